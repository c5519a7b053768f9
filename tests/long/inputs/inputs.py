"""Inputs as people have them, through the product's own doors: tools, schemas, services, rewards, settings, files.

    python -m benchmarks.inputs [--short] [--subject NAME ...] [--out FILE]

Each input is one that a person might give: a default that is a `Field`, a reward that is text, a proxy variable of a
desktop, a file with a mark before its text. It goes through the door that it goes through in a run or a command. The
right outcome was written down by hand: the value that arrives, or the reader of the message, and its words.

`silent` counts inputs that were changed, dropped or taken for something else without a word; `tracebacks` errors that
are none of ours; `wrong_status` refusals of right inputs, and other exit statuses; `unnamed` refusals whose sentence
does not name the error. The last line is one JSON object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tests.long.inputs import (
    call_inputs,
    function_answers,
    function_parameters,
    reward_values,
    row_inputs,
    service_statuses,
    setting_values,
    yaml_schemas,
)
from tests.long.inputs.input_cases import Case, Tried, try_case

SUBJECTS = {
    "parameters": "defaults and descriptions of parameters",
    "returns": "rewards of typed functions",
    "answers": "answers that are no JSON",
    "arguments": "texts of digits in formats with tags",
    "names": "names, and tools of MCP servers",
    "schemas": "schemas and settings in YAML",
    "messages": "Python's inside in messages",
    "proxies": "proxy variables",
    "statuses": "statuses of services",
    "rewards": "rewards",
    "settings": "values of settings, and rows",
    "machines": "machines on which Ray cannot start",
    "signals": "signals to the launcher",
    "files": "files, folders, words and locales",
}
"""Subjects, and their contents."""
SHORT = 16
"""The short form tries one input in so many."""


def all_cases() -> list[Case]:
    """Return all inputs."""
    modules = (
        function_parameters,
        function_answers,
        call_inputs,
        yaml_schemas,
        service_statuses,
        reward_values,
        row_inputs,
        setting_values,
    )
    found = [case for module in modules for case in module.cases()]
    return sorted(found, key=lambda case: list(SUBJECTS).index(case.subject))


async def try_all(cases: Iterable[Case]) -> list[Tried]:
    """Try inputs, one after another: some change the variables of this process."""
    return [await try_case(case) for case in cases]


def short_form(cases: Sequence[Case]) -> list[Case]:
    """Return some inputs of each subject that take a moment."""
    quick = [case for case in cases if not case.is_slow]
    return [case for subject in SUBJECTS for case in [each for each in quick if each.subject == subject][::SHORT]]


def summary_of(tried: Sequence[Tried], seconds: float) -> dict[str, Any]:
    """Return the keys of the last line."""
    counts = Counter(each.counted for each in tried)
    keys = ("silent", "tracebacks", "wrong_status", "unnamed")
    subjects = Counter(each.case.subject for each in tried)
    return {
        "inputs": len(tried),
        **{key: counts[key] for key in keys},  # type: ignore[index]
        "by_subject": {subject: subjects[subject] for subject in SUBJECTS if subjects[subject]},
        "seconds": round(seconds, 1),
    }


def table_of(tried: Sequence[Tried]) -> str:
    """Return a Markdown table: the input, its exit status, the sentence, and the counts."""
    lines = ["| subject | input | right | was | exit status | sentence | counted as |", "|---|---|---|---|---|---|---|"]
    for each in tried:
        status = "" if each.seen.status is None else str(each.seen.status)
        words = [each.case.subject, each.case.given, each.case.right.kind, each.seen.kind, status]
        words += [each.seen.sentence, each.counted]
        lines.append("| " + " | ".join(" ".join(word.split()).replace("|", "\\|")[:400] for word in words) + " |")
    return "\n".join(lines) + "\n"


def wrong_of(tried: Sequence[Tried]) -> list[str]:
    """Return a line for each input that went wrong."""
    return [
        f"{each.counted}: {each.case.subject}: {each.case.given}: {each.seen.kind} {each.seen.value!r:.120} "
        f"{' '.join(each.seen.sentence.split())[:300]!r}; right: "
        f"{each.case.right.kind} {each.case.right.value!r} {list(each.case.right.words)}"
        for each in tried
        if each.counted != "right"
    ]
