"""Run pytest in a fresh workspace and write the result of each test; `pytest_run.py` sends this there as text.

It uses the standard library and pytest. Its output is the word of a process that also runs the model's code. So each
line begins with a word that was drawn for this run, and read before that code ran. Code that searches the memory of its
own process can find the word. It cannot find there which of the tests have to fail.

Arguments: the path of a file of JSON with `word`, `report`, `roots`, `plugins` and `paths`.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main(place: str) -> int:
    """Run the tests that the file names, and return pytest's exit status."""
    with open(place, encoding="utf-8") as file:
        asked = json.load(file)
    os.unlink(place)
    import pytest  # before the tree can be imported from, where a module of that name may lie

    report = os.open(asked["report"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    tell = _teller(report, asked["word"])
    sys.path[:0] = [os.path.abspath(root) for root in asked["roots"]]
    options = ["-q", "-p", "no:cacheprovider", "--color=no", "--tb=line", "--continue-on-collection-errors"]
    # Of the row's own configuration its options count least: they may name plugins, reports and a stop at a failure.
    options += ["-o", "addopts=", "--maxfail=0", "--rootdir", os.getcwd()]
    for plugin in asked["plugins"]:
        options += ["-p", plugin]
    status = int(pytest.main([*options, *asked["paths"]], plugins=[_Outcomes(tell)]))
    tell("", str(status))
    return status


def _teller(report: int, word: str) -> Callable[[str, str], None]:
    write, dumps = os.write, json.dumps

    def tell(name: str, outcome: str) -> None:
        write(report, dumps([word, name, outcome]).encode() + b"\n")

    return tell


class _Outcomes:
    """Writes each test's outcome: `passed` where its preparation, itself and its end passed."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._phases: dict[str, list[tuple[str, str]]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the result of a phase of a test."""
        expected = hasattr(report, "wasxfail")
        self._phases.setdefault(report.nodeid, []).append((report.when, "xfailed" if expected else report.outcome))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Return the result of a test."""
        phases = self._phases.pop(nodeid, [])
        outcome = next((each for _, each in phases if each != "passed"), "nothing")
        if outcome == "nothing" and {when for when, _ in phases} == {"setup", "call", "teardown"}:
            outcome = "passed"  # each `subTest` is one more call
        self._tell(nodeid, outcome)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
