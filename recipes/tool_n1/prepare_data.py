"""Make rows of single steps of tool calling: tools and conversation as the prompt, the next calls as the truth.

    python recipes/tool_n1/prepare_data.py --out DIR [--source SOURCE[,SOURCE ...]] [--smoke]

Forms of the rows of a source:

- xLAM (`query`, `tools` and `answers`, the last two as JSON text): one step;
- ToolACE (`system` with the tools as a JSON list, `conversations` of `from` and `value`, calls written as
  `[name(key="value")]`): each turn that calls tools becomes a step, and the turns before it are the prompt;
- Tool-N1's own files (`prompt` and `reward_model`, as its `toolcall_preprocess.py` writes them): one step, with the
  prompt unchanged.

Steps with calls that cannot be read, or that name a tool that the step does not have, are dropped and counted.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows

SOURCE = "Salesforce/xlam-function-calling-60k,Team-ACE/ToolACE"
Call = dict[str, Any]
Message = dict[str, Any]
Step = tuple[list[Call] | None, list[Message], list[Call]]
"""Tools (None: the conversation's own system message has them), the conversation so far, and the next calls."""

SYSTEM = """You call functions to do what the user asks for. These are the functions, one on a line:
<tools>
{tools}
</tools>
First reason inside <think> and </think>. Then write the calls, each as a JSON object of its own:
<tool_call>
{{"name": <function name>, "arguments": <object of its arguments>}}
</tool_call>
Do both in one message, and mind the types of the arguments."""
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_ROLES |= {"tool": "tool", "observation": "tool", "function_response": "tool"}
_NAME = re.compile(r"\s*([^()\[\]{}'\"=,]+?)\s*\(")


def row(step: Step, data_source: str = "tool_n1", **extra_info: Any) -> Row:
    """Return the row of a step.

    Args:
        step: The step.
        data_source: Name that chooses the reward.
        extra_info: Other fields of `extra_info`.
    """
    tools, messages, calls = step
    if tools is None:
        return make_row(data_source, messages, calls, ability="tool_calling", **extra_info)
    listed = "\n".join(json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools)
    prompt = [{"role": "system", "content": SYSTEM.format(tools=listed)}, *messages]
    return make_row(data_source, prompt, calls, ability="tool_calling", **extra_info)


def steps_of(entry: Mapping[str, Any]) -> Iterator[Step | None]:
    """Yield the steps of a source's row, with None in place of a step that cannot be used.

    Args:
        entry: The row.

    Raises:
        ConfigError: The row has none of the known forms.
    """
    if "query" in entry and "answers" in entry:
        tools, calls = (_json(entry[key]) for key in ("tools", "answers"))
        yield checked((tools, [{"role": "user", "content": entry["query"]}], calls))
    elif "system" in entry and "conversations" in entry:
        yield from _toolace_steps(entry)
    elif "prompt" in entry and "reward_model" in entry:
        truth = _json(entry["reward_model"]["ground_truth"])
        truth = _json(truth)  # in some of its files the JSON is encoded twice
        named = [call for call in truth if isinstance(call, Mapping)] if isinstance(truth, list) else []
        step = checked((named, [dict(message) for message in entry["prompt"]], truth))
        yield None if step is None else (None, *step[1:])
    else:
        raise ConfigError(
            f"a row of the source has the columns {sorted(entry)}; expected query, tools and answers, or system and "
            "conversations, or prompt and reward_model; convert it first"
        )


def checked(step: tuple[Any, list[Message], Any]) -> Step | None:
    """Return a step if it has calls and each one calls a tool of the step; None otherwise.

    Args:
        step: Tools, conversation and calls as read, of any type.

    Returns:
        The step, with only `name` and `arguments` of each call.
    """
    tools, messages, calls = step
    if not isinstance(tools, list) or not isinstance(calls, list) or not calls:
        return None
    names = [tool.get("name") for tool in tools if isinstance(tool, Mapping)]
    if not all(isinstance(call, Mapping) and isinstance(call.get("arguments"), Mapping) for call in calls):
        return None
    if not all(isinstance(call.get("name"), str) and call["name"] in names for call in calls):
        return None
    return tools, messages, [{"name": call["name"], "arguments": call["arguments"]} for call in calls]


def _toolace_steps(entry: Mapping[str, Any]) -> Iterator[Step | None]:
    tools = tools_in(entry["system"])
    messages: list[Message] = []
    for turn in entry["conversations"]:
        role, value = _ROLES.get(turn["from"]), turn["value"]
        if role is None:
            return  # a role that no chat template knows
        calls = read_calls(value) if role == "assistant" else None
        if calls is not None:
            yield checked((tools, list(messages), calls))
            value = "\n".join(tool_call(call["name"], call["arguments"]) for call in calls)
        messages.append({"role": role, "content": value})


def tools_in(system: str) -> list[Call] | None:
    """Return the first JSON list of objects in a text; None: there is none."""
    start = system.find("[{")
    try:
        tools, _ = json.JSONDecoder().raw_decode(system, start) if start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return None
    return tools


def read_calls(text: str) -> list[Call] | None:
    """Read calls written as `[name(key="value"), name with spaces(key=1)]`.

    Args:
        text: The text of a turn.

    Returns:
        The calls, for example `[{"name": "name", "arguments": {"key": "value"}}, …]`; None: the text is something else.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    text, position, calls = text[1:-1], 0, []
    while position < len(text):
        begun = _NAME.match(text, position)
        end = _closing(text, begun.end()) if begun else None
        if begun is None or end is None:
            return None
        arguments = _keywords(text[begun.end() : end])
        if arguments is None:
            return None
        calls.append({"name": begun[1], "arguments": arguments})
        rest = re.compile(r"\s*(?:,|\Z)").match(text, end + 1)
        if rest is None:
            return None
        position = rest.end()
    return calls or None


def _closing(text: str, start: int) -> int | None:
    """Find the index of the `)` that closes the `(` before `start`, skipping quotes and inner brackets; None: none."""
    depth, quote, at = 1, "", start
    while at < len(text):
        character = text[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return None


def _keywords(text: str) -> dict[str, Any] | None:
    """Read keyword arguments with literal values of Python, or true, false and null; None: they are something else."""
    words = {"true": True, "false": False, "null": None}
    try:
        called = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(called, ast.Call) or called.args or any(keyword.arg is None for keyword in called.keywords):
            return None
        return {
            str(keyword.arg): words[keyword.value.id]
            if isinstance(keyword.value, ast.Name)
            else ast.literal_eval(keyword.value)
            for keyword in called.keywords
        }
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
        return None


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


TOOLS: list[Call] = [
    {"name": "set_alarm", "parameters": {"hour": {"type": "int"}, "minute": {"type": "int"}}},
    {"name": "add_item", "parameters": {"item": {"type": "str"}, "count": {"type": "int"}}},
]


def smoke_rows(start: int, size: int) -> list[Row]:
    """Make steps with a demonstration, every second one with two calls.

    Args:
        start: Number of the first step. Steps with other numbers are other steps.
        size: Number of steps.
    """
    rows = []
    for i in range(start, start + size):
        item, count = ("eggs", "pens", "cups", "nuts")[i % 4], 2 + i
        calls: list[Call] = [{"name": "add_item", "arguments": {"item": item, "count": count}}]
        asked, thought = f"Put {count} {item} on the list.", f"The list needs {count} {item}."
        if i % 2:
            calls.append({"name": "set_alarm", "arguments": {"hour": 6 + i, "minute": 30}})
            asked, thought = f"{asked} Wake me at {6 + i}:30.", f"{thought} The alarm rings at {6 + i}:30."
        written = "\n".join(tool_call(call["name"], call["arguments"]) for call in calls)
        step: Step = (TOOLS, [{"role": "user", "content": asked}], calls)
        rows.append(row(step, demonstration=[f"<think>{thought}</think>\n{written}"]))
    return rows


def rows_of(entries: Sequence[Mapping[str, Any]], source: str, split: str) -> list[Row]:
    """Return the rows of a source's entries, and print how many of the steps could be used.

    The rows have the source's name in their `data_source`, so that the validation reports its accuracy separately.

    Args:
        entries: Rows of the source.
        source: Local file or hub name.
        split: Name of the split, for the printed line.

    Raises:
        ConfigError: An entry has an unknown form.
    """
    found = [step for entry in entries for step in steps_of(entry)]
    used = [row(step, f"tool_n1/{Path(source).stem.lower()}") for step in found if step is not None]
    print(f"{source} {split}: {len(used)} of {len(found)} steps", file=sys.stderr)
    return used


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", SOURCE)
    args = parser.parse_args()
    splits: dict[str, list[Row]] = {"train": [], "test": []}
    if args.smoke:
        splits = {"train": smoke_rows(0, 8), "test": smoke_rows(8, 4)}
    else:
        for source in args.source.split(","):
            for split, entries in read_splits(source, splits=("train", "train")).items():
                splits[split] += rows_of(entries, source, split)
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
