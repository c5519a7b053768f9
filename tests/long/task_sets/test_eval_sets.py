"""The named benchmarks pay right solutions of every set, and neither wrong nor empty answers."""

import pytest

from tests.long.task_sets.eval_sets import run


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_right_solutions_are_paid_and_nothing_else() -> None:
    found = run()
    assert found["different"] == []
    assert {name: each["rows"] for name, each in found["sets"].items()} == dict.fromkeys(
        ["aime24", "aime25", "math500", "gsm8k", "livecodebench_v5", "codeforces", "bfcl", "tau2", "terminal"], 10
    )
    assert {each["reference"] for each in found["sets"].values()} == {1.0}
    assert {each["empty"] for each in found["sets"].values()} == {0.0}
    assert {each.get("wrong", 0.0) for each in found["sets"].values()} == {0.0}
