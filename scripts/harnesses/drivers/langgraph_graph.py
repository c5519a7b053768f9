"""A LangGraph graph of a model and its tools, run to its end and then once more, streamed."""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def read_file(name: str) -> str:
    """Return the text of a file."""
    return Path(name).read_text(encoding="utf-8")


def graph(streaming: bool):
    """Return a compiled graph: the model, and the tools that it calls."""
    model = ChatOpenAI(model="policy", streaming=streaming).bind_tools([read_file])

    def ask(state: MessagesState) -> dict:
        return {"messages": [model.invoke(state["messages"])]}

    made = StateGraph(MessagesState)
    made.add_node("ask", ask)
    made.add_node("tools", ToolNode([read_file]))
    made.add_edge(START, "ask")
    made.add_conditional_edges("ask", tools_condition)
    made.add_edge("tools", "ask")
    return made.compile()


if __name__ == "__main__":
    end = graph(streaming=False).invoke({"messages": [("user", "Which lot is in lot.txt?")]})
    print("invoke:", end["messages"][-1].content)
    for state in graph(streaming=True).stream({"messages": [("user", "Read lot.txt.")]}, stream_mode="values"):
        last = state["messages"][-1]
    print("stream:", last.content)
