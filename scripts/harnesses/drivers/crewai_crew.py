"""A crew of CrewAI: an agent with a tool, and one task."""

from __future__ import annotations

import os
from pathlib import Path

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def read_file(name: str) -> str:
    """Return the text of a file."""
    return Path(name).read_text(encoding="utf-8")


if __name__ == "__main__":
    served = LLM("openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    reader = Agent(role="Reader", goal="Read files.", backstory="You read.", tools=[read_file], llm=served)
    task = Task(description="Which lot is in lot.txt?", expected_output="The lot.", agent=reader)
    print("kickoff:", Crew(agents=[reader], tasks=[task]).kickoff().raw)
