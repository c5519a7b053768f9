"""A function of advantages of one's own: its place, its options, what it is shown, what it returns, its state."""

import logging
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_multiturn.advantages import function as module
from verl_multiturn.advantages.function import AdvantageFunction, function_of, load_function
from verl_multiturn.advantages.turns import GroupMember
from verl_multiturn.errors import AdvantageContractError, ConfigError, RewardContractError
from verl_multiturn.rollout.turn import Turn


def member(*rewards: float, valid: bool = True, outcome: float = 0.0) -> GroupMember:
    return GroupMember([Turn(number, reward) for number, reward in enumerate(rewards)], valid, outcome)


def rewards(group: Sequence[GroupMember], scale: float = 1.0) -> list[float]:
    return [scale * each.reward for each in group]


def returning(value: Any) -> AdvantageFunction:
    return function_of(lambda group: value, {}, "my:f")


def test_a_function_is_named_by_its_module_or_its_file(tmp_path: Path) -> None:
    assert load_function(f"{__name__}:rewards", {"scale": 2}).of_group([member(1.0, 2.0)], "a") == [[6.0, 6.0]]
    file = tmp_path / "own.py"
    file.write_text(
        textwrap.dedent("""
            from __future__ import annotations
            from dataclasses import dataclass

            @dataclass
            class Own:
                seen: int = 0

            def advantages(group):
                return [1.0 for _ in group]
        """)
    )
    assert load_function(f"{file}:advantages").of_group([member(1.0)], "a") == [[1.0]]
    assert load_function(f"{file}:advantages").call is load_function(f"{file}:advantages").call


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my_module", "expected 'package.module:function' or 'path/to/file.py:function'"),
        ("json:", "expected 'package.module:function'"),
        ("../x:f", "expected 'package.module:function'"),
        ("nowhere/x.py:f", "there is no file"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("json:dump_", "did you mean 'dump'"),
        (f"{__name__}:np", "which cannot be called; name a function"),
    ],
)
def test_a_place_that_names_no_function_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(name)
    assert says in str(caught.value)
    assert "algorithm.adv_estimator" in str(caught.value)


def test_a_file_that_raises_is_refused_and_read_again_when_it_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"own.py' \(ZeroDivisionError"):
        load_function(f"{file}:f")
    file.write_text("def f(group):  # mended\n    return [0.0 for _ in group]\n")
    assert load_function(f"{file}:f").of_group([member(1.0)], "a") == [[0.0]]


def with_options(group: Any, gamma: float, *, kind: str = "a", weights: "tuple[int, ...]" = ()) -> list[float]:
    return [gamma + sum(weights) + len(kind) for _ in group]


def test_options_are_read_by_the_signature() -> None:
    made = load_function(f"{__name__}:with_options", {"gamma": "0.5", "weights": [1, 2]})
    assert made.options == {"gamma": 0.5, "weights": (1, 2)}
    assert made.of_group([member(0.0)], "a") == [[4.5]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs the option 'gamma'; set custom.multiturn.advantage.options.gamma"),
        ({"gama": 1.0}, "options.gama: algorithm.adv_estimator="),
        ({"gamma": 1.0, "group": []}, "options.group: "),
        ({"gamma": "high"}, "options.gamma='high'"),
        ({"gamma": True}, "takes a number"),
    ],
)
def test_options_that_the_signature_does_not_take_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(f"{__name__}:with_options", options)
    assert says in str(caught.value)


def test_what_is_no_function_of_a_group_is_refused() -> None:
    async def late(group: Any) -> list[float]:
        return []

    class Half:
        def __call__(self, group: Any) -> list[float]:
            return []

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Needs(Half):
        def __init__(self, size: int) -> None: ...

    for found, says in [
        (late, "is asynchronous"),
        (lambda: [], "takes no group"),
        (lambda *, group: [], "takes no group"),
        (lambda group, other, /: [], "takes 'other' by its place alone"),
        (Half, "has no load_state_dict"),
        (Half(), "is an object with state_dict(); name its class"),
        (Needs, "cannot be built without arguments (TypeError"),
        (3, "which cannot be called"),
    ]:
        with pytest.raises(ConfigError) as caught:
            function_of(found, {}, "my:f")
        assert says in str(caught.value)


def test_it_is_shown_copies_of_the_valid_members_with_turns_in_order() -> None:
    turns = [Turn(2, 4.0, "s", 0, 0, "white", start=7, end=9), Turn(0, 1.0, None, None, 1, "white", start=0, end=7)]
    group = [member(9.0, valid=False), GroupMember(turns, True, 0.5, "white"), member(3.0)]
    seen: list[GroupMember] = []

    def spoil(shown: list[GroupMember]) -> list[Any]:
        seen.extend(shown)
        values = [[float(turn.number) for turn in each.turns] for each in shown]
        for each in shown:
            each.turns[0].reward = 100.0
            each.turns.clear()  # type: ignore[attr-defined]
        shown.clear()
        return values

    before = repr(group)
    assert function_of(spoil, {}, "my:f").of_group(group, "a") == [[0.0], [2.0, 0.0], [0.0]]
    assert repr(group) == before
    assert [(each.outcome, each.role, each.valid) for each in seen] == [(0.5, "white", True), (0.0, None, True)]


def test_a_group_without_a_valid_member_is_not_shown() -> None:
    assert returning(None).of_group([member(1.0, 2.0, valid=False)], "a") == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "value", [[1, [2.0, 3]], (True, (2, 3.0)), [np.float32(1), np.array([2.0, 3.0])], [np.array(1.0), [2, 3]]]
)
def test_a_number_or_one_for_each_turn(value: Any) -> None:
    assert returning(value).of_group([member(0.0, 1.0), member(0.0, 1.0)], "a") == [[1.0, 1.0], [2.0, 3.0]]
    assert returning(np.array([[1, 1], [2, 3]])).of_group([member(0.0, 1.0)] * 2, "a") == [[1.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "returned None in"),
        (1.0, "returned 1.0 in"),
        ("12", "returned '12' in"),
        ({0: 1.0, 1: 2.0}, "returned {0: 1.0, 1: 2.0} in"),
        ([1.0], "returned 1 values, [1.0], in"),
        ([1.0, 2.0, 3.0], "returned 3 values"),
        ([1.0, None], "returned None for conversation 1"),
        ([1.0, float("nan")], "returned nan for conversation 1"),
        ([1.0, float("-inf")], "returned -inf for conversation 1"),
        ([1.0, 1e30], "returned 1e+30 for conversation 1"),
        ([1.0, [1.0, 2.0, 3.0]], "returned 3 values, [1.0, 2.0, 3.0], for conversation 1"),
        ([1.0, [1.0, float("nan")]], "returned nan for conversation 1"),
        ([1.0, [[1.0, 2.0], 1.0]], "returned [1.0, 2.0] for conversation 1"),
        ([1.0, "2"], "returned '2' for conversation 1"),
        (iter([1.0, 2.0]), "iterator"),
    ],
)
def test_other_values_are_refused_with_function_group_and_value(value: Any, says: str) -> None:
    with pytest.raises(AdvantageContractError) as caught:
        returning(value).of_group([member(0.0, 1.0), member(0.0, 5.0)], "u7")
    text = str(caught.value)
    assert says in text
    assert "algorithm.adv_estimator='my:f'" in text
    assert "the group u7 of 2 conversations with the rewards [1.0, 5.0]; return " in text


def test_what_it_raises_is_named_with_its_line() -> None:
    def broken(group: Any) -> Any:
        raise SystemExit("done")

    with pytest.raises(AdvantageContractError, match=r"raised SystemExit: done \(test_advantage_function.py:\d+\)"):
        function_of(broken, {}, "my:f").of_group([member(0.0)], "a")


@pytest.mark.parametrize("broken", [member(0.0, float("nan")), member(0.0, outcome=float("inf"))])
def test_a_reward_that_is_no_number_is_not_the_functions_fault(broken: GroupMember) -> None:
    with pytest.raises(RewardContractError, match="a: "):
        returning([0.0, 0.0]).of_group([member(1.0), broken], "a")


def test_a_slow_step_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 9.0, 10.0, 22.0, 30.0, 50.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    made = returning([0.0])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert made.of_groups({"a": [member(1.0)], "b": [member(2.0)]}) == {"a": [[0.0]], "b": [[0.0]]}
    assert [record.getMessage().partition(", while")[0] for record in caplog.records] == [
        "algorithm.adv_estimator='my:f' took 12 s for the 2 groups of a step"
    ]


class Baseline:
    def __init__(self) -> None:
        self.mean: Any = 0.0

    def __call__(self, group: Sequence[GroupMember], decay: float = 0.5) -> list[float]:
        made = [each.reward - self.mean for each in group]
        self.mean += (1 - decay) * sum(made) / len(made)
        return made

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_a_class_keeps_a_state() -> None:
    first = load_function(f"{__name__}:Baseline", {"decay": 0.75})
    assert first.has_state
    assert not returning([]).has_state
    assert first.of_group([member(4.0)], "a") == [[4.0]]
    assert first.of_group([member(4.0)], "a") == [[3.0]]
    second = first.fresh()
    assert second.of_group([member(4.0)], "a") == [[4.0]]
    second.load_state(first.state())
    assert first.state() == second.state() == {"mean": 1.75}
    assert first.of_group([member(4.0)], "a") == second.of_group([member(4.0)], "a") == [[2.25]]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({1: 2}, "[1]"),
        ((1, 2), "['mean'] is (1, 2) of type tuple"),
        ({"a": [float("nan")]}, "['mean']['a'][0] is nan"),
        (np.zeros(2), "of type ndarray"),
    ],
)
def test_a_state_that_json_does_not_hold_is_refused(state: Any, says: str) -> None:
    made = function_of(Baseline, {}, "my:f")
    made.call.mean = state  # type: ignore[attr-defined]
    with pytest.raises(AdvantageContractError) as caught:
        made.state()
    assert ("which is not a text" if says == "[1]" else says) in str(caught.value)


def test_a_state_that_cannot_be_saved_or_loaded_is_named() -> None:
    made = function_of(Baseline, {}, "my:f")
    with pytest.raises(AdvantageContractError, match=r"load_state_dict\({}\) raised KeyError: 'mean'"):
        made.load_state({})
    del made.call.mean  # type: ignore[attr-defined]
    with pytest.raises(AdvantageContractError, match=r"state_dict\(\) raised AttributeError"):
        made.state()


def test_a_function_that_does_not_return_is_warned_of_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.01)

    def waits(group: Sequence[GroupMember]) -> list[float]:
        while not caplog.records:  # for ever, without the warning
            time.sleep(0.01)
        return [0.0] * len(group)

    function_of(waits, {}, "my:waits").of_groups({"u": [member(1.0)]})
    (record,) = caplog.records
    assert "algorithm.adv_estimator='my:waits' has not returned for 0 s" in record.getMessage()


def test_options_are_as_given_in_each_call() -> None:
    def adds(group: Sequence[GroupMember], seen: list[int]) -> list[float]:
        seen.append(0)
        return [float(len(seen))] * len(group)

    options = {"seen": []}
    made = function_of(adds, options, "my:adds").of_groups({"u": [member(1.0)], "v": [member(1.0)]})
    assert made["u"] == made["v"]
    assert options == {"seen": []}
