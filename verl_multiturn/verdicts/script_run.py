"""One run of a task's `test.sh` in a workspace, and the reward that it writes: Harbor's convention."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from verl_multiturn.verdicts.control_run import DisturbedError
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.workspace import Workspace

_MOST_BYTES = 2**20
_TESTS, REWARD_FOLDER = "/tmp/tests", "/tmp/logs/verifier"
"""Where `/tests` and `/logs/verifier` lead: only below `/tmp` can anything be made."""
_SIGNALS = 128
"""Exit statuses above it are those of a shell that a signal has ended."""


async def run_script(
    workspace: Workspace, files: Mapping[str, str], timeout_s: float, variables: Mapping[str, str]
) -> float:
    """Run `/tests/test.sh`, and return the reward that it wrote.

    Args:
        workspace: A fresh workspace with the tree in its folder, where the script starts.
        files: Files of `/tests`.
        timeout_s: Seconds for the run.
        variables: Its environment variables.

    Raises:
        DisturbedError: The script was late or killed, or wrote no reward from 0 to 1.
        WorkspaceError: The workspace ended.
        SandboxError: It was lost.
    """
    await workspace.put(write_tar({path: text.encode() for path, text in files.items()}), _TESTS)
    await workspace.put(write_tar({}), REWARD_FOLDER)
    result = await workspace.run("bash /tests/test.sh", timeout_s=timeout_s, env=variables)
    if result.timed_out:
        raise DisturbedError(f"test.sh took longer than {timeout_s:g} s")
    if result.stopped is not None:
        raise DisturbedError(result.stopped)
    if result.exit_code is None or result.exit_code > _SIGNALS:
        raise DisturbedError(f"test.sh did not end by itself (exit status {result.exit_code})")
    await workspace.end_processes()
    tar = await workspace.get("reward.txt", "reward.json", path=REWARD_FOLDER, max_bytes=_MOST_BYTES)
    return read_reward(read_tar(tar, max_entries=4, max_bytes=_MOST_BYTES).files, result.output)


def read_reward(files: Mapping[str, bytes], output: str = "") -> float:
    """Return the reward that a script wrote.

    Args:
        files: `reward.txt` with a number, or `reward.json` with a mapping: its `reward`, or the only one that it has.
        output: The script's output, for the error. Nothing is read from it.

    Raises:
        DisturbedError: There is none, or it is not a number from 0 to 1.
    """
    if not files:
        raise DisturbedError(f"test.sh wrote no reward; it printed: {output[-500:]}")
    try:
        value = float(files["reward.txt"].decode()) if "reward.txt" in files else _of_json(files["reward.json"])
    except (ValueError, KeyError, RecursionError, OverflowError):
        raise DisturbedError(f"test.sh wrote no number: {next(iter(files.values()))[:100]!r}") from None
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise DisturbedError(f"test.sh wrote the reward {value!r}, expected a number from 0 to 1")
    return value


def reward_entry(rewards: Mapping[str, Any]) -> Any:
    """Return the entry of a mapping of rewards that counts: `reward`, or the only one.

    Args:
        rewards: The mapping.

    Raises:
        KeyError: There is none.
    """
    return rewards["reward"] if "reward" in rewards or len(rewards) != 1 else next(iter(rewards.values()))


def _of_json(content: bytes) -> float:
    found: Any = json.loads(content)
    value = reward_entry(found) if isinstance(found, dict) else found
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return float(value)
