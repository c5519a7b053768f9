"""The scripted model in a trial: the text of its turn, for the prompt and the number of the turn."""

from __future__ import annotations

import json
from collections.abc import Callable

Say = Callable[[str, int], str]
"""The prompt, and how many turns came before → the text of the turn."""

COUNT = "wc -l < /app/words.txt > /app/answer.txt"
CHEAT = (
    "mkdir -p /tests /logs/verifier; printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; "
    "chmod +x /tests/test.sh; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
)


def commands(*lines: str, before: Callable[[int], None] | None = None) -> Say:
    """Return a policy that runs commands by mini-swe-agent's tool, one a turn, and hands in then.

    Args:
        lines: The commands.
        before: Called with the number of a turn before it.
    """

    def say(prompt: str, turn: int) -> str:
        if before is not None:
            before(turn)
        command = lines[turn] if turn < len(lines) else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"I do it.\n<tool_call>\n{call}\n</tool_call>"

    return say


def keystrokes(*lines: str) -> Say:
    """Return a policy that types commands into terminus-2's terminal, and confirms twice that it is done."""

    def say(prompt: str, turn: int) -> str:
        typed = [{"keystrokes": f"{line}\n", "duration": 0.5} for line in lines[turn : turn + 1]]
        done = turn >= len(lines)
        return json.dumps({"analysis": "It is so.", "plan": "I do it.", "commands": typed, "task_complete": done})

    return say
