"""An agent of smolagents with a tool.

Usage: smolagents_agent.py code|tools
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def read_file(name: str) -> str:
    """Return the text of a file.

    Args:
        name: Name of the file.
    """
    return Path(name).read_text(encoding="utf-8")


if __name__ == "__main__":
    served = OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
    print("run:", kind(tools=[read_file], model=served, max_steps=4).run("Which lot is in lot.txt?"))
