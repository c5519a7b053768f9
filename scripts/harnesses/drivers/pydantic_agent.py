"""An agent of pydantic-ai with a tool, run to its end and then once more, streamed.

Usage: pydantic_agent.py openai|anthropic
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent

MODELS = {"openai": "openai-chat:policy", "anthropic": "anthropic:policy"}


async def run(model: str) -> None:
    """Run the agent twice, with two questions."""
    agent = Agent(model, system_prompt="Use the tool.")

    @agent.tool_plain
    def read_file(name: str) -> str:
        """Return the text of a file."""
        return Path(name).read_text(encoding="utf-8")

    print("run:", (await agent.run("Which lot is in lot.txt?")).output)
    async with agent.run_stream("Read lot.txt.") as stream:
        print("stream:", await stream.get_output())


if __name__ == "__main__":
    asyncio.run(run(MODELS[sys.argv[1]]))
