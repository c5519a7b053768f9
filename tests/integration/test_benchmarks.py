"""The benchmarks run; what they measure is no test's matter."""

from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.stack


async def test_turn_cost_runs_both_loops() -> None:
    from transformers import AutoTokenizer

    from benchmarks.turn_cost import run_ours, run_verl

    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    for clock in (await run_ours(4, tokenizer), await run_verl(4, tokenizer)):
        assert len(clock.asked) == 4
        assert clock.milliseconds_at(4) > 0
