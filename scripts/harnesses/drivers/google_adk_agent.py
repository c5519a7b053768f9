"""An agent of Google's ADK with a tool: two questions in one session, the second one streamed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part


def read_file(name: str) -> str:
    """Return the text of a file."""
    return Path(name).read_text(encoding="utf-8")


async def ask(runner: InMemoryRunner, session: str, text: str, mode: StreamingMode) -> str:
    """Return the last text of the agent's answer to a question."""
    message, said = Content(role="user", parts=[Part(text=text)]), ""
    async for event in runner.run_async(
        user_id="user", session_id=session, new_message=message, run_config=RunConfig(streaming_mode=mode)
    ):
        if event.is_final_response() and event.content and event.content.parts:
            said = event.content.parts[0].text or said
    return said


async def run() -> None:
    """Ask twice."""
    served = LiteLlm("openai/policy", api_base=os.environ["OPENAI_BASE_URL"])
    agent = LlmAgent(name="reader", model=served, instruction="Use the tool.", tools=[read_file])
    runner = InMemoryRunner(agent=agent, app_name="harness")
    session = await runner.session_service.create_session(app_name="harness", user_id="user")
    print("run:", await ask(runner, session.id, "Which lot is in lot.txt?", StreamingMode.NONE))
    print("stream:", await ask(runner, session.id, "Say it again.", StreamingMode.SSE))


if __name__ == "__main__":
    asyncio.run(run())
