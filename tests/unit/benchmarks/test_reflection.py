"""The arithmetic of `benchmarks.reflection`: equal tokens, interpolation, intervals; its points and its user."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import reflection
from benchmarks.reflection import is_far, points_of, shown
from benchmarks.reflection_curves import (
    Point,
    accuracy,
    compared,
    differences,
    over_seeds,
    picture,
    values_at,
    values_until,
)
from benchmarks.reflection_task import WRONG, Verdict, held_out, row, trained

CURVE = [Point(0, [0.0, 0.0], [0.0, 1.0]), Point(100, [1.0, 0.0], [1.0, 1.0]), Point(300, [0.0, 1.0], [1.0, 0.0])]


def test_a_curve_is_read_off_between_its_validations() -> None:
    assert values_at(CURVE, 0, "first") == [0.0, 0.0]
    assert values_at(CURVE, 100, "final") == [1.0, 1.0]
    assert values_at(CURVE, 150, "first") == [0.75, 0.25]  # a quarter of the way from 100 to 300
    assert values_at(CURVE, 250, "final") == [1.0, 0.25]
    with pytest.raises(ValueError, match=r"301 tokens: expected 0 to 300"):
        values_at(CURVE, 301, "first")


def test_the_mean_over_the_tokens_is_the_area_below_the_curve() -> None:
    # First row: 50 up to 100 tokens, then 100 · (1 + 0.5) / 2 = 75 up to 200. Second row: 100 · (0 + 0.5) / 2 = 25.
    assert values_until(CURVE, 200, "first") == [125 / 200, 25 / 200]
    assert values_until(CURVE, 100, "first") == [0.5, 0.0]
    assert values_until(CURVE, 50, "final") == [0.25, 1.0]
    with pytest.raises(ValueError, match="begins at 100 tokens; expected 0"):
        values_until(CURVE[1:], 200, "first")


def test_a_difference_over_rows_and_over_seeds() -> None:
    one = [[0.0] * 100, [0.0] * 50 + [1.0] * 50]
    two = [[1.0] * 20 + [0.0] * 80, [1.0] * 100]
    found = differences(one, two)
    # Together: rows 1 to 20 differ by 1, rows 21 to 50 by 0.5, the others by 0. t of 99 degrees: 1.98422.
    assert found["mean"] == 0.35
    assert found["interval_over_rows"] == [pytest.approx(0.350 - 0.077877, abs=1e-5), pytest.approx(0.427877, abs=1e-5)]
    assert [each["mean"] for each in found["by_seed"]] == [0.2, 0.5]
    assert found["by_seed"][0]["interval"] == [pytest.approx(0.120230, abs=1e-5), pytest.approx(0.279770, abs=1e-5)]
    # Two seeds: t of one degree is 12.7062, the deviation of 0.2 and 0.5 is 0.212132.
    assert found["interval_over_seeds"] == [-1.555931, 2.255931]


def test_the_interval_over_seeds() -> None:
    assert over_seeds([0.1, 0.2, 0.3]) == [-0.048414, 0.448414]  # 0.2 ∓ 4.302653 · 0.1 / √3
    assert over_seeds([0.1]) is None


def test_an_accuracy_has_the_interval_of_its_rows() -> None:
    found = accuracy([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert found["mean"] == 0.375
    assert found["by_seed"] == [0.5, 0.25]
    low, high = found["interval_over_rows"]
    assert 0.0 < low < 0.375 < high < 1.0


def test_both_arms_are_compared_at_the_same_number_of_tokens(tmp_path: Path) -> None:
    one = [Point(0, [0.0, 0.0], [0.0, 0.0]), Point(120, [1.0, 0.0], [1.0, 1.0])]
    two = [Point(0, [0.0, 0.0], [0.0, 0.0]), Point(200, [0.0, 0.0], [1.0, 1.0])]
    found = compared([one], [two], 100)
    assert found["answer"]["one"]["mean"] == round(100 / 120 / 2, 6)  # the first answer, at 100 of 120 tokens
    assert found["answer"]["two"]["mean"] == 0.5  # the final answer, at 100 of 200 tokens
    assert found["answer"]["difference"]["mean"] == round(0.5 - 100 / 240, 6)
    assert found["answer"]["difference_over_the_run"]["mean"] == round(0.25 - 100 / 480, 6)
    assert found["first"]["difference"]["mean"] == round(-100 / 240, 6)
    assert found["final"]["difference"]["mean"] == round(0.5 - 100 / 120, 6)
    assert found["final"]["difference"]["interval_over_seeds"] is None
    with pytest.raises(ValueError, match="130 tokens: expected 0 to 120"):
        compared([one], [two], 130)
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        picture([one], [two], 100, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_bytes()) < 100_000


def record(step: int, tokens: list[int], index: int, rewards: list[float], validation: bool) -> dict[str, Any]:
    return {
        "step": step,
        "validation": validation,
        "sample": {"index": index},
        "generations": [{"tokens": count} for count in tokens],
        "replies": [{"reward": reward} for reward in rewards],
    }


def test_points_from_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "HELD_OUT", 2)
    records = [
        record(0, [5, 5], 0, [0.0, 1.0], True),
        record(0, [5], 1, [1.0], True),
        record(1, [6, 7], 8, [0.0, 0.0], False),
        record(2, [8], 9, [1.0], False),
        record(2, [9, 9], 1, [0.0], True),  # the second turn was cut: no reply
        record(2, [9, 9], 0, [0.0, 0.0], True),
        record(3, [100], 8, [1.0], False),
        record(3, [9], 0, [1.0], True),  # broken off: the other row is missing
    ]
    found = points_of(records)
    assert found == {0: Point(0, [0.0, 1.0], [1.0, 1.0]), 2: Point(21, [0.0, 0.0], [0.0, 0.0])}
    assert shown({"points": list(found.values()), "steps": 2}) == {"curve": [[0, 0.5, 1.0], [21, 0.0, 0.0]], "steps": 2}


def test_a_run_is_far_enough_after_a_validation_alone() -> None:
    entries: list[dict[str, Any]] = [
        {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.1}},
        {"step": 1, "data": {"rollout/certificate/tokens": 60.0}},
        {"step": 2, "data": {"rollout/certificate/tokens": 40.0}},
        {"step": 3, "data": {"rollout/certificate/tokens": 1.0, "val-core/sums/acc/mean@1": 0.2}},
    ]
    assert not is_far(entries[:3], 100)
    assert is_far(entries, 100)
    assert is_far(entries, 101)
    assert not is_far(entries, 102)


def test_the_user_ends_at_a_right_answer_or_after_the_last_try() -> None:
    user = Verdict({})
    asked = [{"role": "user", "content": "State the final answer to the following arithmetic problem: 38 - 57 ="}]
    wrong, right = ({"role": "assistant", "content": f"Answer: {number}"} for number in (-29, -19))

    def replied(messages: list[dict[str, str]], tries: int) -> tuple[str, float | None, bool]:
        reply = user.reply("a", messages, truth="-19", tries=tries)
        return reply.text, reply.reward, reply.done

    assert replied([*asked, right], 2) == (WRONG, 1.0, True)
    assert replied([*asked, wrong], 1) == (WRONG, 0.0, True)
    assert replied([*asked, wrong], 2) == (WRONG, 0.0, False)
    again = [*asked, wrong, {"role": "user", "content": WRONG}]
    assert replied([*again, right], 2) == (WRONG, 1.0, True)
    assert replied([*again, wrong], 2) == (WRONG, 0.0, True)


def test_no_held_out_sum_is_trained_on_and_each_seed_has_sums_of_its_own() -> None:
    questions = {entry["question"] for entry in held_out()}
    assert len(questions) == len(held_out()) == reflection.HELD_OUT
    seeds = [trained(seed) for seed in (0, 1)]
    assert [len(entries) for entries in seeds] == [2048, 2048]
    first, second = ({entry["question"] for entry in entries} for entries in seeds)
    assert not questions & (first | second)
    # reasoning_gym's seed counts on by one: neighbouring seeds would have all but one in common.
    assert len(first & second) < 1024
    kwargs = row(seeds[0][0], 1)["extra_info"]["interaction_kwargs"]
    assert kwargs == {"verdict": {"truth": seeds[0][0]["answer"], "tries": 1}}
