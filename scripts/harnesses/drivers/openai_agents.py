"""Agents of openai-agents: one uses a tool; then one hands over to another, streamed.

Usage: openai_agents.py responses|chat
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def read_file(name: str) -> str:
    """Return the text of a file.

    Args:
        name: Name of the file.
    """
    return Path(name).read_text(encoding="utf-8")


async def run() -> None:
    """Run an agent with a tool, then an agent that hands over to a second one."""
    reader = Agent(name="reader", instructions="Read the file.", tools=[read_file], model="policy")
    done = await Runner.run(reader, "Which lot is in lot.txt?")
    print("run:", done.final_output)

    desk = Agent(name="desk", instructions="Hand over to the reader.", handoffs=[reader], model="policy")
    streamed = Runner.run_streamed(desk, "Have lot.txt read.")
    async for _ in streamed.stream_events():
        pass
    print("streamed:", streamed.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    set_default_openai_api("responses" if sys.argv[1] == "responses" else "chat_completions")
    asyncio.run(run())
