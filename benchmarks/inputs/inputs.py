"""Inputs as people have them, through the product's own doors: tools, schemas, services, rewards, settings, files.

    python -m benchmarks.inputs [--short] [--line N ...] [--out FILE]

Each input is one that a person might give: a default that is a `Field`, a reward that is text, a proxy variable of a
desktop, a file with a mark before its text. It goes through the door that it goes through in a run or a command. What
is right was written down by hand: the value that arrives, or who is told, and in which words.

`silent` counts inputs that were changed, left out or taken for something else without a word; `tracebacks` errors that
are none of ours; `wrong_status` refusals of what is right, and other exit statuses; `unnamed` refusals whose sentence
does not name what is wrong. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import typed_parameters, typed_returns, written_calls, yaml_schemas
from benchmarks.input_cases import Case, Tried, try_case

LINES = {
    7: "defaults and descriptions of parameters",
    8: "rewards of typed functions",
    9: "answers that are no JSON",
    10: "texts of digits in formats with tags",
    11: "names, and tools of MCP servers",
    12: "schemas and settings in YAML",
    13: "Python's inside in messages",
}
"""Subjects, by their number."""
SHORT = 6
"""The short form tries one input in so many."""


def all_cases() -> list[Case]:
    """Return all inputs."""
    modules = (typed_parameters, typed_returns, written_calls, yaml_schemas)
    found = [case for module in modules for case in module.cases()]
    return sorted(found, key=lambda case: case.line)


async def try_all(cases: Iterable[Case]) -> list[Tried]:
    """Try inputs, one after another: some change the variables of this process."""
    return [await try_case(case) for case in cases]


def short_form(cases: Sequence[Case]) -> list[Case]:
    """Return some inputs of each subject that take a moment."""
    return [case for case in cases if not case.is_slow][::SHORT]


def summary_of(tried: Sequence[Tried], seconds: float) -> dict[str, Any]:
    """Return the keys of the last line."""
    counts = Counter(each.counted for each in tried)
    keys = ("silent", "tracebacks", "wrong_status", "unnamed")
    lines = Counter(each.case.line for each in tried)
    return {
        "inputs": len(tried),
        **{key: counts[key] for key in keys},  # type: ignore[index]
        "by_line": {str(line): lines[line] for line in sorted(lines)},
        "seconds": round(seconds, 1),
    }


def table_of(tried: Sequence[Tried]) -> str:
    """Return a Markdown table: the input, its exit status, the sentence, and what was counted."""
    lines = ["| line | input | right | was | exit status | sentence | counted as |", "|---|---|---|---|---|---|---|"]
    for each in tried:
        status = "" if each.seen.status is None else str(each.seen.status)
        words = [str(each.case.line), each.case.given, each.case.right.kind, each.seen.kind, status]
        words += [each.seen.sentence, each.counted]
        lines.append("| " + " | ".join(" ".join(word.split()).replace("|", "\\|")[:400] for word in words) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try the inputs, and print those that went wrong and the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inputs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true", help="try some of each subject, in seconds")
    parser.add_argument("--line", type=int, action="append", choices=LINES, help="only this subject; repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table into this file")
    arguments = parser.parse_args()
    logging.getLogger("verl_multiturn").setLevel(logging.CRITICAL)  # it warns of what is tried here
    cases = [case for case in all_cases() if not arguments.line or case.line in arguments.line]
    began = time.monotonic()
    tried = asyncio.run(try_all(short_form(cases) if arguments.short else cases))
    for each in tried:
        if each.counted != "right":
            said, value = " ".join(each.seen.sentence.split())[:300], f"{each.seen.value!r:.120}"
            right = each.case.right
            print(f"{each.counted}: line {each.case.line}: {each.case.given}: {each.seen.kind} {value} {said!r}; right: "
                  f"{right.kind} {right.value!r} {list(right.words)}")  # fmt: skip
    if arguments.out:
        arguments.out.write_text(table_of(tried), encoding="utf-8")
    summary = summary_of(tried, time.monotonic() - began)
    print(json.dumps(summary))
    return 0 if all(each.counted == "right" for each in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
