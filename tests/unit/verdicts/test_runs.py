"""Output of a run of tests, read on the host."""

from __future__ import annotations

import json
from unittest.mock import create_autospec

import pytest

from verl_multiturn.errors import OutageError
from verl_multiturn.sandbox.sandbox import CellResult, Sandbox
from verl_multiturn.verdicts.control_run import DisturbedError
from verl_multiturn.verdicts.judge import unpack
from verl_multiturn.verdicts.pytest_run import read_report
from verl_multiturn.verdicts.script_run import read_reward


def lines(*entries: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in entries)


def test_a_report_is_the_lines_with_the_word() -> None:
    report = lines(["w", "a", "passed"], ["x", "a", "failed"], ["w", "b", "failed"], 7, {"w": 1}, ["w", "c"])
    report += b"3 passed in 0.01s\n\xff\n" + b"[" * 100_000 + b"\n" + lines(["w", "a", "passed"], ["w", "", "1"])
    assert read_report(report, "w") == {"a": "passed", "b": "failed"}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (b"", "came to no end: it printed this"),
        (lines(["w", "a", "passed"]), "came to no end"),
        (lines(["x", "a", "passed"], ["x", "", "0"]), "came to no end"),
        (lines(["w", "a", "passed"], ["w", "a", "failed"], ["w", "", "0"]), "two things of one test"),
        (lines(["w", "", "0"], ["w", "a", "passed"]), "two things of one test"),
    ],
)
def test_a_report_that_says_nothing(report: bytes, said: str) -> None:
    with pytest.raises(DisturbedError, match=said):
        read_report(report, "w", "it printed this")


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": b" 0.25\n"}, 0.25),
        ({"reward.txt": b"1"}, 1.0),
        ({"reward.json": b'{"reward": 0.5, "style": 3}'}, 0.5),
        ({"reward.json": b'{"tests": 1}'}, 1.0),
        ({"reward.json": b"0"}, 0.0),
    ],
)
def test_a_reward_is_read(files: dict[str, bytes], reward: float) -> None:
    assert read_reward(files) == reward


@pytest.mark.parametrize(
    "files",
    [
        {},
        *({"reward.txt": text} for text in (b"", b"nan", b"inf", b"1e9", b"-0.1", b"1.0001", b"yes", b"\xff", b"1\n1")),
        *({"reward.json": text} for text in (b"{}", b'{"a": 1, "b": 0}', b'{"reward": true}', b'"1"', b"[1]", b"NaN")),
        {"reward.json": b'{"reward": ' + b"[" * 100_000},
    ],
)
def test_what_is_no_number_from_0_to_1_is_no_reward(files: dict[str, bytes]) -> None:
    with pytest.raises(DisturbedError, match=r"test\.sh wrote"):
        read_reward(files)


async def test_a_sandbox_that_ends_while_a_tree_is_unpacked_says_nothing_of_the_tree() -> None:
    sandbox = create_autospec(Sandbox, instance=True)
    sandbox.run.return_value = CellResult("No space left on device")
    with pytest.raises(DisturbedError, match="the tree cannot be unpacked: No space left on device"):
        await unpack(sandbox, b"tar")
    sandbox.run.return_value = CellResult("", "the sandbox is lost: it ended without a word")
    with pytest.raises(OutageError, match="a sandbox could not be prepared: the sandbox is lost"):
        await unpack(sandbox, b"tar")
