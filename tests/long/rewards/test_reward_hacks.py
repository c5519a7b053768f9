"""Wrong answers that try to earn: one of each kind, and all of them."""

from __future__ import annotations

import pytest

from tests.long.rewards import reward_hacks, rubric_judges
from tests.long.rewards.hacks import Tried, read_cases
from verl_multiturn.rewards.router import REWARDS

pytestmark = pytest.mark.slow

SLOW = {"math", "reasoning_gym"}
"""Rewards that have no short form: their packages take long to load."""
LEAST_KINDS = 11
PLACES = {"$root": ".", "$url": "http://127.0.0.1:9/v1"}
DOCS = reward_hacks.DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "is_quick"),
    [
        *((name, True) for name in [*REWARDS, "float32"] if name not in SLOW),
        *(
            pytest.param(name, False, marks=[pytest.mark.long, *([pytest.mark.stack] if name == "otc" else [])])
            for name in reward_hacks.NAMES
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")  # of verl's trainers, at import
async def test_no_wrong_answer_earns(name: str, is_quick: bool) -> None:
    tried = await reward_hacks.try_all([name], quick=is_quick)
    assert len({each.kind for each in tried}) >= LEAST_KINDS
    assert reward_hacks.faults(tried, DOCS) == []


@pytest.mark.parametrize("name", REWARDS)
def test_there_are_hacks_of_many_kinds(name: str) -> None:
    cases = read_cases(name, PLACES)
    hacks = [case.tried for case in cases if not case.tried.control and not case.tried.looseness]
    assert len({hack.kind for hack in hacks}) >= (20 if name in ("code", "sql", "judge") else LEAST_KINDS)
    assert len(hacks) >= 50
    assert any(case.tried.control for case in cases)
    stated = {f"| {case.tried.looseness} | {case.tried.of} |" for case in cases if case.tried.looseness}
    assert all(row in DOCS for row in stated)


def test_what_counts_as_a_fault() -> None:
    docs = "| loose | Library | x |"
    tried = [
        Tried("qa", "a", "not paid", 0.0),
        Tried("qa", "a", "as little as a wrong one", -1.0, honest=-1.0),
        Tried("qa", "b", "paid", 0.5),
        Tried("qa", "b", "paid more than a wrong one", 0.0, honest=-1.0),
        Tried("qa", "looseness", "stated", 1.0, looseness="loose", of="Library"),
        Tried("qa", "looseness", "not so loose", 0.0, looseness="loose", of="Library"),
        Tried("qa", "looseness", "not stated", 1.0, looseness="loose", of="Other"),
        Tried("qa", "control", "right", 1.0, control=True),
        Tried("qa", "control", "right and not paid", 0.0, control=True),
    ]
    lines = reward_hacks.faults(tried, docs)
    assert [line.split("'")[-2] for line in lines] == [
        "paid",
        "paid more than a wrong one",
        "not so loose",
        "not stated",
        "right and not paid",
    ]
    summary = reward_hacks.summarize(tried, lines)
    assert (summary["tried"], summary["paid"], summary["kinds"]) == (4, 2, {"qa": 2})
    assert (summary["right"], summary["right_unpaid"], summary["faults"]) == (2, 1, 5)
    assert summary["looseness"] == {"Library": ["loose"], "Other": ["loose"]}


@pytest.mark.parametrize(
    ("judges", "rewards"),
    [
        (("strict", "obeys", "echo"), ["tool_n1"]),
        pytest.param(rubric_judges.JUDGES, None, marks=pytest.mark.long),
    ],
)
async def test_no_text_earns_from_a_scripted_judge(judges: tuple[str, ...], rewards: list[str] | None) -> None:
    found = await rubric_judges.judge_all(judges, rewards)
    assert rubric_judges.faults(found) == []
    assert len({each.case for each in found if each.part == "texts"}) > 20
    assert [each.score for each in found if each.judge == "strict" and each.part == "literal"] == [
        0.875, 0.75, 0.75, 0.25, 0.0, 0.0, 0.125
    ]  # fmt: skip
