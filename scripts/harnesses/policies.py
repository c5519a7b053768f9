"""The model's answers to each program: functions of the prompt, in the form of Qwen3's template.

Every task is the same: `lot.txt` in the working folder holds a made-up lot number, and the model has to name it. It can
know the number only from the answer of a real tool, so a program that prints it at its end has run one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Policy = Callable[[str], str]
"""The prompt as the model sees it → the text of its turn, without the end token."""

FILE = "lot.txt"
TASK = f"Which lot is in {FILE}? Use your tools."
SUBTASK = f"Look into {FILE} for your parent."
_LOT = re.compile(r"lot-[0-9a-f]{9}")
_USER = "<|im_start|>user\n"


def call(tool: str, /, **arguments: Any) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def lot_in(prompt: str) -> str | None:
    """Return the lot number that a tool has brought into the prompt; None if none has."""
    found = _LOT.search(prompt)
    return found and found.group()


def reader(tool: str, /, **arguments: Any) -> Policy:
    """Return a policy that calls one tool, and then answers."""

    def say(prompt: str) -> str:
        lot = lot_in(prompt)
        return f"The lot is {lot}." if lot else call(tool, **arguments)

    return say


def second_looker(tool: str, /, **arguments: Any) -> Policy:
    """Return a policy that calls one tool twice, one call after the other, and then answers."""

    def say(prompt: str) -> str:
        twice = len(_LOT.findall(prompt)) > 1
        return f"The lot is {lot_in(prompt)}." if twice else call(tool, **arguments)

    return say


def openai_sdk(prompt: str) -> str:
    """Answer in JSON where that is requested."""
    lot = lot_in(prompt)
    return json.dumps({"lot": lot}) if "as JSON" in prompt else reader("read_file", name=FILE)(prompt)


def openai_agents(prompt: str) -> str:
    """Hand over where the instructions want it."""
    to_hand_over = "Hand over to the reader." in prompt
    return call("transfer_to_reader") if to_hand_over else reader("read_file", name=FILE)(prompt)


def smolagents_code(prompt: str) -> str:
    """Write code, which ends with the text at which the program makes the model stop."""
    lot = lot_in(prompt)
    code = f'final_answer("{lot}")' if lot else f'print(read_file("{FILE}"))'
    return f"Thought: {'I know it' if lot else 'I read the file'}.\n<code>\n{code}\n</code>"


def smolagents_tools(prompt: str) -> str:
    """End with the tool that takes the answer."""
    lot = lot_in(prompt)
    return call("final_answer", answer=lot) if lot else call("read_file", name=FILE)


def mini_swe_agent(prompt: str) -> str:
    """End with the command that hands in its output."""
    hand_in = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && " if lot_in(prompt) else ""
    return f"I look into it.\n{call('bash', command=f'{hand_in}cat {FILE}')}"


def claude_code(prompt: str) -> str:
    """Have a sub-agent read the file."""
    if _USER in prompt and SUBTASK in prompt.split(_USER, 1)[1].split("<|im_start|>assistant", 1)[0]:
        return reader("Bash", command=f"cat {FILE}", description="Read a file")(prompt)
    return reader("Agent", description="read a file", prompt=SUBTASK, subagent_type="general-purpose")(prompt)


def codex(prompt: str) -> str:
    """Read the file, and look at it again until the program sums up the conversation."""
    lot = lot_in(prompt)
    if not lot:
        return call("exec_command", cmd=f"cat {FILE}")
    calls = "# Tools" in prompt  # the request for a summary has none
    read = f"cat {FILE}" in prompt
    return call("exec_command", cmd=f"wc -c {FILE}") if calls and read else f"The lot is {lot}."
