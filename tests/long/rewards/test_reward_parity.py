"""Rewards beside their originals: few cases of the slow ones, and all cases of each."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from benchmarks.reward_parity import main
from tests.long.rewards import reward_parity
from tests.long.rewards.parity import Compared

pytestmark = pytest.mark.slow

OF_VERL = {"gsm8k", "math", "qa", "code"}


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list(reward_parity.REWARDS))
async def test_no_reward_differs_from_its_original_in_silence(name: str, is_quick: bool) -> None:
    if name in OF_VERL and importlib.util.find_spec("verl") is None:
        pytest.skip("the originals are verl's, which is not installed")
    compared = await reward_parity.compare_all([name], quick=is_quick)
    assert len(compared) >= 5
    assert {case.agrees for case in compared} >= {True}
    assert reward_parity.unstated(compared) == []


def test_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reward_parity", "qa", "quality"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("'quality' is no reward with an original; name some of gsm8k, math, qa")


def test_what_counts_as_stated() -> None:
    docs = "| difference | ours |\n|---|---|\n| a word | better |\n"
    cases = {
        Compared("qa", "a", 1.0, 1.0): "agreed",
        Compared("qa", "b", 1.0, 0.0): "unstated",
        Compared("qa", "c", 1.0, 0.0, "a word"): "stated",
        Compared("qa", "d", 1.0, 1.0, "a word"): "unstated",
        Compared("qa", "e", 1.0, 0.0, "another"): "unstated",
    }
    assert {case: reward_parity.verdict(case, docs) for case in cases} == cases
    assert list(reward_parity.summarize(list(cases), docs).values()) == [5, 1, 1, 3]
