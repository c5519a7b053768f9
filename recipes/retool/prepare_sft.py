"""Make the cold start's rows for verl's multi-turn SFT: the columns `messages`, with tool calls, and `tools`.

    python recipes/retool/prepare_sft.py --out DIR [--source JoeYing/ReTool-SFT] [--tools TOOLS.yaml] [--smoke]

A row of the source has two messages. The first has the question, after the mark `*user question:*`. The second has the
answer, in which `<code>` and `<interpreter>` sections alternate, with the result in `<answer>`. A source may also have
verl's form already: `messages` with the roles user, assistant and tool. Rows of other forms, and rows with code that
has no output, are dropped and counted.

System message and tool are those of the recipe's own rows, so that reinforcement learning continues where the cold
start ends.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prepare_data import SYSTEM, TOOL, bare_problem, smoke_problems, worked

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import arguments, prepare, read_splits
from verl_multiturn.tools.loading.registry import load_tools

SOURCE = "JoeYing/ReTool-SFT"
Message = dict[str, Any]
_QUESTION = "*user question:*"
_STEP = re.compile(r"(.*?)<code>(.*?)</code>\s*<interpreter>(.*?)</interpreter>", re.DOTALL)
_FENCED = re.compile(r"```(?:python)?\n(.*?)\n?```", re.DOTALL)
_TAGS = re.compile(r"</?(?:answer|code|interpreter)>")


def call(said: str, code: str) -> Message:
    """Return an assistant's message that calls the interpreter.

    Args:
        said: Text before the call.
        code: Code for the interpreter.
    """
    function = {"name": TOOL, "arguments": {"code": code}}
    return {"role": "assistant", "content": said.strip(), "tool_calls": [{"type": "function", "function": function}]}


def conversation(question: str, answer: str) -> list[Message] | None:
    """Convert a row of ReTool-SFT to messages with tool calls.

    Args:
        question: The first message of the row.
        answer: The second message of the row.

    Returns:
        The messages; None: the sections of the answer do not fit together.
    """
    before, mark, problem = question.partition(_QUESTION)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": bare_problem(_TAGS.sub("", problem if mark else before))},
    ]
    end = 0
    for step in _STEP.finditer(answer):
        said, code, output = step.groups()
        if any(_TAGS.search(part) for part in step.groups()):
            return None
        fenced = _FENCED.search(code)
        messages += [call(said, (fenced[1] if fenced else code).strip()), {"role": "tool", "content": output.strip()}]
        end = step.end()
    rest = answer[end:].replace("<answer>", "").replace("</answer>", "").strip()
    if end == 0 or not rest or _TAGS.search(rest):
        return None
    return [*messages, {"role": "assistant", "content": rest}]


def messages_of(entry: Mapping[str, Any]) -> list[Message] | None:
    """Return the conversation of a source's row; None: the row cannot be used.

    Args:
        entry: The row.

    Raises:
        ConfigError: The row has fewer than two messages.
    """
    messages = entry.get("messages")
    if messages is None or len(messages) < 2:
        raise ConfigError(f"a row of the source has the columns {sorted(entry)}; expected messages, two or more")
    if len(messages) == 2:
        return conversation(messages[0]["content"], messages[1]["content"])
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    roles = {message["role"] for message in plain}
    if not roles <= {"system", "user", "assistant", "tool"}:
        return None
    return plain if plain[0]["role"] == "system" else [{"role": "system", "content": SYSTEM}, *plain]


def smoke_conversations(start: int, size: int) -> list[list[Message]]:
    """Make conversations, the same ones that the tiny model of `--smoke` knows.

    Args:
        start: Number of the first problem.
        size: Number of conversations.
    """
    conversations = []
    for text, code, answer in smoke_problems(start, size):
        first, last = worked(code, answer)
        conversations.append(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": text},
                call(first.partition("\n<tool_call>")[0], code),
                {"role": "tool", "content": answer},
                {"role": "assistant", "content": last},
            ]
        )
    return conversations


def write(folder: Path, split: str, conversations: Sequence[Sequence[Message]], tools: list[dict[str, Any]]) -> None:
    """Write the conversations of a split to `<split>.parquet`.

    Args:
        folder: Folder for the file. It is made if it does not exist.
        split: Name of the split.
        conversations: The messages of each conversation.
        tools: Tool schemas, the same for every conversation.
    """
    import pyarrow as pa
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"messages": list(messages), "tools": tools} for messages in conversations])
    pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", SOURCE)
    args = parser.parse_args()
    tools = [load_tools(args.tools or Path(__file__).with_name("tools.yaml"))[TOOL].tool_schema.as_dict()]
    if args.smoke:
        splits = {"train": smoke_conversations(0, 8), "test": smoke_conversations(8, 4)}
    else:
        splits = {}
        for split, entries in read_splits(args.source, splits=("train", "train"), held_out=0.02).items():
            found = [messages_of(entry) for entry in entries]
            splits[split] = [messages for messages in found if messages is not None]
            print(f"{split}: {len(splits[split])} of {len(found)} conversations", file=sys.stderr)
    for split, conversations in splits.items():
        if not conversations:
            raise ConfigError(f"the split {split!r} has no conversations; see above how many were left out")
    for split, conversations in splits.items():
        write(args.out, split, conversations, tools)


if __name__ == "__main__":
    prepare(main)
