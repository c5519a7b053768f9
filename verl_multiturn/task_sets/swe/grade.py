"""Grade the log of a run of tests: `python3 grade.py LOG EXPECTED` prints the reward, 1 or 0.

This file is copied into tasks whose image may have an old Python: it needs 3.6, and the standard library alone.

EXPECTED is JSON: `{"form": "names", "passed": [name, …]}`, where each of these names has to be reported as passed; or
`{"form": "summary", "statuses": {name: status, …}}`, where the summary of pytest has to report exactly these.
"""

import json
import re
import sys
from typing import Any

_STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


def statuses_of(log: str) -> "dict[str, str]":
    """Return the status of each test that pytest reports, in its summary or behind the test's name."""
    found = {}  # type: dict[str, str]
    for line in _ESCAPES.sub("", log).split("\n"):
        words = line.split()
        if len(words) > 1 and words[0] in _STATUSES:
            found[words[1]] = words[0]
        elif len(words) > 1 and "::" in words[0] and words[1] in _STATUSES:
            found.setdefault(words[0], words[1])
    return found


def summary_of(log: str) -> "dict[str, str]":
    """Return the status of each test of pytest's short summary, by its name without the file: `Class.test`."""
    found = {}  # type: dict[str, str]
    for line in _ESCAPES.sub("", log).partition("short test summary info")[2].split("\n"):
        status = next((each for each in ("PASSED", "FAILED", "ERROR") if each in line), None)
        if status is not None:
            found[plain(".".join(line.split("::")[1:]))] = status
    return found


def plain(name: str) -> str:
    """Return a name without colours, and without the reason of a failure behind it."""
    return _ESCAPES.sub("", name).split(" - ")[0].strip()


def grade(log: str, expected: "dict[str, Any]") -> int:
    """Return the reward of a log."""
    if expected["form"] == "summary":
        wanted = {plain(name): status for name, status in expected["statuses"].items()}
        return int(summary_of(log) == wanted)
    found = statuses_of(log)
    return int(all(found.get(name) in ("PASSED", "XFAIL") for name in expected["passed"]))


if __name__ == "__main__":
    log_path, expected_path = sys.argv[1:]
    # No parentheses around the two: they are 3.9's.
    with open(log_path, errors="replace", encoding="utf-8") as text, open(expected_path, encoding="utf-8") as told:
        print(grade(text.read(), json.load(told)))
