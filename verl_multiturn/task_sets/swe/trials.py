"""Trials: a package's tests run on a tree of it, with the outcome of each, while tasks are prepared.

No model has seen these trees, so the tests' own report is believed. A tree from a model is scored by
`verdicts/judge.py` instead.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.workspace import Workspace

PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q -p no:cacheprovider"
"""How tests are run: without plugins that happen to be installed, and so that no file remains."""
_FOLDER = "/tmp/trial"
_REPORTER = f'''
import json
outcomes = {{}}
def pytest_collectreport(report):
    if report.failed:
        outcomes[report.nodeid] = ["failed", str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()]
def pytest_runtest_logreport(report):
    known = outcomes.get(report.nodeid, ["passed", ""])
    if report.failed and known[0] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        outcomes[report.nodeid] = ["failed", getattr(crash, "message", None) or str(report.longrepr)]
    elif report.skipped:  # also what is expected to fail
        outcomes[report.nodeid] = ["skipped", ""]
    elif report.nodeid not in outcomes and report.when == "call":
        outcomes[report.nodeid] = known
def pytest_sessionfinish(session):
    with open("{_FOLDER}/outcomes.json", "w") as file:
        json.dump(outcomes, file)
'''
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of one test."""

    kind: str
    """`passed`, `failed` or `skipped`."""
    message: str = ""
    """Message of a failed one, without the place. Addresses of objects are omitted."""


async def run_tests(
    workspace: Workspace, files: Mapping[str, bytes], tests: Sequence[str], timeout_s: float
) -> dict[str, TrialOutcome] | None:
    """Run tests on a tree, and return their outcomes by their names in pytest.

    Args:
        workspace: A fresh workspace.
        files: The tree.
        tests: Files with tests, or names of single ones.
        timeout_s: Seconds for all of them.

    Returns:
        The outcomes; None if the tests did not end in time, or could not be reported.
    """
    await workspace.put(write_tar(files))
    await workspace.put(write_tar({"trial_reporter.py": _REPORTER.encode()}), _FOLDER)
    command = f"PYTHONPATH={_FOLDER}:$PYTHONPATH {PYTEST} -p trial_reporter {shlex.join(tests)}"
    result = await workspace.run(command, timeout_s=timeout_s)
    if result.exit_code is None:
        return None
    report = read_tar(await workspace.get("outcomes.json", path=_FOLDER)).files.get("outcomes.json")
    if report is None:
        return None
    return {name: TrialOutcome(kind, _ADDRESS.sub("0x…", said)) for name, (kind, said) in json.loads(report).items()}


def needed_packages(name: str) -> tuple[str, ...]:
    """Return the needs of a package's tests beside itself: pytest, and the package's requirements, if installed.

    Args:
        name: Name of the package, which is installed.
    """
    found = ["pytest"]
    for each in requires(name) or []:
        wanted = re.match(r"[A-Za-z0-9._-]+", each)
        if wanted and "extra ==" not in each:
            try:
                requires(wanted[0])
            except PackageNotFoundError:  # for another Python, or another system
                continue
            found.append(wanted[0])
    return tuple(found)
