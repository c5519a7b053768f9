"""An agent of Strands with a tool: two questions in one conversation."""

from __future__ import annotations

from pathlib import Path

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def read_file(name: str) -> str:
    """Return the text of a file.

    Args:
        name: Name of the file.
    """
    return Path(name).read_text(encoding="utf-8")


if __name__ == "__main__":
    agent = Agent(
        OpenAIModel(model_id="policy"), tools=[read_file], system_prompt="Use the tool.", callback_handler=None
    )
    print("first:", agent("Which lot is in lot.txt?"))
    print("second:", agent("Say it again."))
