"""An agent of Agno with a tool, run to its end and then once more, streamed.

Usage: agno_agent.py chat|responses
"""

from __future__ import annotations

import sys
from pathlib import Path

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses


def read_file(name: str) -> str:
    """Return the text of a file."""
    return Path(name).read_text(encoding="utf-8")


if __name__ == "__main__":
    served = OpenAIChat(id="policy") if sys.argv[1] == "chat" else OpenAIResponses(id="policy")
    agent = Agent(model=served, tools=[read_file], instructions="Use the tool.", telemetry=False)
    print("run:", agent.run("Which lot is in lot.txt?").content)
    events = agent.run("Read lot.txt.", stream=True)
    print("stream:", "".join(event.content or "" for event in events if event.event == "RunContent"))
