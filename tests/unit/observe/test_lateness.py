from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn.observe.explain import stragglers
from verl_multiturn.observe.explain.lateness import Straggler, critical_path, late_of_step


def span(kind: str, start: float, end: float, name: str = "") -> dict[str, Any]:
    return {"kind": kind, "name": name, "turn": 0, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "parts"),
    [
        ([], {}),
        (
            [span("generation", 0, 4), span("call", 4, 6, "search"), span("generation", 6, 10)],
            {"engine": 8, "tool search": 2},
        ),
        # of two calls that run side by side, the longer one
        (
            [span("generation", 0, 2), span("call", 2, 5, "a"), span("call", 2, 9, "b"), span("generation", 9, 10)],
            {"engine": 3, "tool b": 7},
        ),
        # a call that waited for its slot while another one ran: the wait, not the other one
        (
            [span("call", 0, 6, "a"), span("wait", 0, 6, "b"), span("call", 6, 10, "b")],
            {"queue b": 6, "tool b": 4},
        ),
        # an opponent is no tool, and has no slots
        ([span("wait", 0, 6, "opponent step 4"), span("call", 6, 10, "b")], {"opponent step 4": 6, "tool b": 4}),
        ([span("generation", 1, 3), span("reward", 4, 10)], {"other": 2, "engine": 2, "reward": 6}),
        ([span("generation", 0, 10), span("pause", 2, 7)], {"engine": 10}),
        ([span("request", 0, 10), span("generation", 2, 10)], {"other": 2, "engine": 8}),
        # clocks that were set back, and spans beyond the end
        ([span("generation", 0, 12), span("call", 5, 4, "a"), span("call", -9, -3, "a")], {"engine": 10}),
        ([span("create", 0, 1), span("interaction", 1, 10, "user")], {"create": 1, "interaction user": 9}),
    ],
)  # fmt: skip
def test_the_parts_of_a_critical_path_add_up(spans: list[dict[str, Any]], parts: dict[str, float]) -> None:
    assert critical_path(spans, 0, 10) == parts
    assert sum(parts.values()) in (0, 10)


def talk(request_id: str, generated: int = 10, **parts: float) -> Any:
    return SimpleNamespace(
        request_id=request_id, began=0.0, ended=sum(parts.values()), parts_s=parts, generated=generated
    )


def test_the_last_conversation_is_compared_with_the_median() -> None:
    talks = [talk(str(number), engine=2.0, reward=1.0) for number in range(4)] + [talk("late", engine=2.5, reward=9.0)]
    assert late_of_step(3, talks) == Straggler(3, "late", "reward", 8.0, 8.5, 0.0)


def test_a_longer_answer_explains_its_own_seconds() -> None:
    talks = [talk(str(number), 10, engine=2.0) for number in range(4)] + [talk("long", 40, engine=9.0)]
    assert late_of_step(1, talks) == Straggler(1, "long", "engine", 7.0, 7.0, 6.0)  # 30 tokens more, 0.2 s each


def test_a_slow_opponent_is_no_tool_with_too_few_slots() -> None:
    late = Straggler(1, "late", "opponent step 4", 9.0, 9.0, 0.0)
    finding = stragglers._of_part("opponent step 4", [late], {1: 12.0}, waits=True)
    assert finding is not None
    assert finding.said.startswith("opponent step 4 made 1 steps late by 9.0 s")
    assert "proxy.opponent_devices" in finding.remedy


def test_of_three_conversations_nobody_is_late() -> None:
    assert late_of_step(1, [talk("a", engine=1.0), talk("b", engine=2.0), talk("c", engine=3.0)]) is None
