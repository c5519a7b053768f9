"""One run of pytest in a workspace, and its result for each test."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from verl_multiturn.verdicts.canaries import SuiteLayout
from verl_multiturn.verdicts.control_run import DisturbedError
from verl_multiturn.verdicts.task import PytestVerdict
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.workspace import Workspace

_GUEST = Path(__file__).with_name("pytest_guest.py").read_text(encoding="utf-8")
_MOST_REPORT_BYTES = 8 * 2**20


async def run_pytest(
    workspace: Workspace, verdict: PytestVerdict, layout: SuiteLayout, timeout_s: float
) -> Mapping[str, str]:
    """Run tests, and return the outcome of each one by its name.

    Args:
        workspace: A fresh workspace with the tree in its folder.
        verdict: The verdict.
        layout: The tests.
        timeout_s: Seconds for the run.

    Raises:
        DisturbedError: The run did not end, or gave two results for one test.
        WorkspaceError: The workspace ended.
        SandboxError: It was lost.
    """
    folder, word = f"/tmp/{secrets.token_hex(8)}", secrets.token_hex(16)
    asked = {
        "word": word,
        "report": f"{folder}/report",
        "roots": verdict.roots,
        "plugins": verdict.plugins,
        "paths": layout.paths,
    }
    await workspace.put(write_tar({path: text.encode() for path, text in layout.files.items()}))
    files = {"run.py": _GUEST.encode(), "asked.json": json.dumps(asked).encode(), "home/.empty": b""}
    await workspace.put(write_tar(files), folder)
    result = await workspace.run(
        shlex.join(["python3", "-s", "-P", f"{folder}/run.py", f"{folder}/asked.json"]),
        timeout_s=timeout_s,
        env={"HOME": f"{folder}/home", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )
    if result.timed_out:
        raise DisturbedError(f"the tests took longer than {timeout_s:g} s")
    if result.stopped is not None:
        raise DisturbedError(result.stopped)
    await workspace.end_processes()
    tar = await workspace.get("report", path=folder, max_bytes=_MOST_REPORT_BYTES)
    report = read_tar(tar, max_entries=1, max_bytes=_MOST_REPORT_BYTES).files.get("report", b"")
    return read_report(report, word, result.output)


def read_report(report: bytes, word: str, output: str = "") -> Mapping[str, str]:
    """Return a run's result for each test.

    Args:
        report: The lines that `pytest_guest.py` wrote, and whatever else was written there.
        word: The word with which its lines begin.
        output: The run's output, for the error.

    Raises:
        DisturbedError: The run did not end, or gave two results for one test.
    """
    outcomes: dict[str, str] = {}
    ended = False
    for line in report.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not (isinstance(found, list) and len(found) == 3 and all(isinstance(each, str) for each in found)):
            continue
        if not secrets.compare_digest(found[0].encode("utf-8", "replace"), word.encode()):
            continue
        _, name, outcome = found
        if ended or outcomes.get(name, outcome) != outcome:
            raise DisturbedError("the run says two things of one test")
        ended = name == ""
        if name:
            outcomes[name] = outcome
    if not ended:
        raise DisturbedError(f"the run came to no end: {output[-500:]}")
    return outcomes
