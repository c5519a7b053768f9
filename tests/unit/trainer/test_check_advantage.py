"""`check-advantage`: a function that is broken in one way is caught by the check for it; sound ones pass."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from tests.long.training import algorithms
from verl_multiturn.advantages.function import AdvantageFunction, function_of, load_function
from verl_multiturn.advantages.turns import (
    Advantages,
    GroupMember,
    of_completions,
    of_conversations,
    of_discounted,
    of_states,
    of_turns,
)
from verl_multiturn.checking.advantage_contract import ADVICE, RAISED, check_advantage
from verl_multiturn.checking.examination import CheckResult, Grade
from verl_multiturn.checking.made_groups import GroupMaker, chain, in_rows
from verl_multiturn.cli.main import app

Group = Sequence[GroupMember]


def checked(found: Any, **options: Any) -> dict[str, CheckResult]:
    return {each.check: each for each in check_advantage(function_of(found, options, "my:f"))}


def problems(found: Any) -> list[str]:
    return [name for name, each in checked(found).items() if each.verdict is Grade.PROBLEM]


def mean(group: Group) -> float:
    return fmean(member.reward for member in group)


def less_the_mean(group: Group) -> list[float]:
    expected = mean(group)  # once: a check has 1,000 siblings
    return [member.reward - expected for member in group]


@pytest.mark.parametrize("found", [of_conversations, of_turns, of_states])
def test_our_own_estimators_pass_every_check(found: Any) -> None:
    findings = checked(found)
    assert list(findings) == list(ADVICE)
    assert {each.verdict for each in findings.values()} == {Grade.OK}


@pytest.mark.parametrize("found", [of_completions, of_discounted])
def test_estimators_that_read_rows_are_told_so(found: Any) -> None:
    options = {"gamma": 0.5}
    warned = [name for name, each in checked(found, **options).items() if each.verdict is not Grade.OK]
    assert warned == ["rows"]
    assert checked(found, **options)["rows"].verdict is Grade.WARNING


def test_what_is_no_fault_is_reported() -> None:
    findings = checked(less_the_mean)
    sums = "sum to 0 over the turns in 0 of 8 groups, over the conversations' means in 8; largest 1.52"
    assert findings["values"].found == sums
    assert findings["equal scores"].found.startswith("all 0") or "e-1" in findings["equal scores"].found
    plain = checked(lambda group: [member.reward for member in group])
    assert "over the conversations' means in 0;" in plain["values"].found
    assert plain["equal scores"].found == "largest 3.3"


def test_each_planted_fault_is_found_by_its_check(tmp_path: Path) -> None:
    assert algorithms.planted_found(tmp_path) == algorithms.FAULTS
    assert len(set(algorithms.FAULTS)) == 12


class Kept:
    """A sound class: the reward less the mean of all that it saw before the group."""

    def __init__(self) -> None:
        self.seen: Any = [0.0, 0]

    def __call__(self, group: Group) -> list[float]:
        total, count = self.seen
        self.seen = [total + sum(member.reward for member in group), count + len(group)]
        return [member.reward - (total / count if count else 0.0) for member in group]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class KeepsATuple(Kept):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": tuple(self.seen)}


class LoadsNothing(Kept):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Shares(Kept):
    everything: ClassVar[Any] = [0.0, 0]

    def __init__(self) -> None:
        self.seen = self.everything

    def __call__(self, group: Group) -> list[float]:
        made = super().__call__(group)
        type(self).everything = self.seen
        return made


class ChangesWhatItGaveOut(Kept):
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"total": 0.0}

    def __call__(self, group: Group) -> list[float]:
        self.state["total"] += mean(group)
        return [member.reward - self.state["total"] for member in group]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {**state}


def changes_a_turn(group: Group) -> list[float]:
    for member in group:
        member.turns[-1].reward = 0.0
    return [0.0 for _ in group]


def one_for_each_turn_and_one_more(group: Group) -> list[list[float]]:
    return [[member.reward] * (len(member.turns) + 1) for member in group]


def knows_two_roles(group: Group) -> list[float]:
    sign = {"white": 1.0, "black": -1.0}
    return [sign[member.role or ""] * member.reward for member in group]


def knows_no_role(group: Group) -> list[float]:
    assert group[0].role is None
    return [0.0 for _ in group]


def ends_the_program(group: Group) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (Kept, [], ""),
        (ChangesWhatItGaveOut, [], ""),
        (KeepsATuple, ["state"], "of type tuple"),
        (LoadsNothing, ["state"], "after load_state_dict() of that"),
        (Shares, ["same input"], "at first, and"),
        (changes_a_turn, ["its input"], "and changed it to turns that earned"),
        (one_for_each_turn_and_one_more, ["values"], "return one number, or "),
        (knows_two_roles, ["values"], "KeyError: ''"),
        (knows_no_role, ["values"], "AssertionError"),
        (ends_the_program, ["values"], "raised SystemExit: 3"),
    ],
)
def test_other_faults(found: Callable[[Group], Any], expected: list[str], says: str) -> None:
    findings = checked(found)
    assert [name for name, each in findings.items() if each.verdict is Grade.PROBLEM] == expected
    for name in expected:
        assert says in findings[name].found
        is_raised = " raised " in findings[name].found and name == "values"
        assert findings[name].remedy == (RAISED if is_raised else ADVICE[name])


class Leaky(AdvantageFunction):
    """The estimator with a fault of ours: invalid members are shown, too."""

    def of_group(self, group: Group, label: str) -> Advantages:
        return super().of_group([replace(each, valid=True) for each in group], label)


class Blind(AdvantageFunction):
    """The estimator with a fault of ours: a reward that is NaN is shown as 0."""

    def of_group(self, group: Group, label: str) -> Advantages:
        known = [each if each.reward == each.reward else chain([0.0, 0.0], [None, None]) for each in group]
        return super().of_group(known, label)


@pytest.mark.parametrize(("kind", "says"), [(Leaky, "beside two invalid ones"), (Blind, "NaN was let through")])
def test_faults_of_ours_are_found_too(kind: type[AdvantageFunction], says: str) -> None:
    findings = check_advantage(kind("my:f", lambda group: [mean(group)] * len(group)))
    (finding,) = [each for each in findings if each.verdict is Grade.PROBLEM]
    assert finding.check == "invalid siblings"
    assert says in finding.found


def test_after_a_problem_with_values_the_other_checks_are_skipped() -> None:
    findings = list(checked(one_for_each_turn_and_one_more).values())
    assert [each.verdict for each in findings] == [Grade.PROBLEM] + [Grade.SKIPPED] * (len(ADVICE) - 1)


def test_a_function_may_know_certain_roles_alone() -> None:
    findings = check_advantage(function_of(knows_two_roles, {}, "my:f"), roles=("white", "black"))
    assert {each.verdict for each in findings} == {Grade.OK}


def test_without_a_role_the_advice_names_the_option() -> None:
    assert checked(knows_two_roles)["values"].remedy.endswith(
        "where it knows certain roles alone, give them: --role NAME"
    )


def test_a_state_may_make_the_order_count() -> None:
    class Running(Kept):
        def __call__(self, group: Group) -> list[float]:
            return [super(Running, self).__call__([member])[0] for member in group]

    finding = checked(Running)["order of siblings"]
    assert finding.verdict is Grade.WARNING
    assert "it keeps a state" in finding.found


def test_a_call_that_does_not_return_is_found() -> None:
    over = threading.Event()

    def waits(group: Group) -> list[float]:
        if len(group) == 1000:
            over.wait()
        return [0.0 for _ in group]

    findings = check_advantage(function_of(waits, {}, "my:f"), timeout_s=0.5)
    over.set()
    assert (findings[-1].check, findings[-1].verdict) == ("1,000 siblings", Grade.PROBLEM)
    assert findings[-1].found == "a call does not return within 0.5 s"


def test_a_conversation_is_cut_into_rows() -> None:
    whole = chain([None, 0.5, None, 1.0, 2.0], [None] * 5)
    assert [(turn.number, turn.parent, turn.after) for turn in whole.turns] == [
        (0, None, 4), (1, 0, 3), (2, 1, 2), (3, 2, 1), (4, 3, 0),
    ]  # fmt: skip
    assert [(turn.number, turn.parent, turn.after) for turn in in_rows(whole, 2).turns] == [
        (0, None, 1), (1, 0, 0), (2, None, 1), (3, 2, 0), (4, None, 0),
    ]  # fmt: skip
    assert in_rows(whole, 2).reward == whole.reward == 3.5


def test_made_groups_are_the_same_each_time_and_sessions_are_forests() -> None:
    assert GroupMaker().ordinary() == GroupMaker().ordinary()
    forest = GroupMaker(["white"]).forest()
    assert {each.role for each in forest} == {"white"}
    parents = [turn.parent for each in forest for turn in each.turns if turn.number]
    assert None in parents
    assert any(parent is not None and parent != number - 1 for each in forest for number, parent in (
        (turn.number, turn.parent) for turn in each.turns
    ))  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(
        "def sound(group, scale: float = 1.0, *, kind: str = 'a'):\n"
        "    return [scale * len(kind) for _ in group]\n"
        "def broken(group):\n"
        "    return [1.0]\n"
    )
    return file


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["check-advantage", *words], env={"COLUMNS": "300"})


def test_the_command(own: Path) -> None:
    done = run(f"{own}:sound", "scale=2", "kind=off")
    assert done.exit_code == 0, done.output
    assert "largest 6" in done.output
    assert run(f"{own}:sound", "--options", '{"scale": 2, "kind": "ab"}').exit_code == 0
    assert run(f"{own}:sound", "--role", "white").exit_code == 0
    assert run("mt_turns", "gamma=0.5").exit_code == 0
    done = run(f"{own}:broken")
    assert done.exit_code == 1
    assert "returned 1 values, [1.0], in the group" in done.output
    assert "1 problem(s)" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "expected 'package.module:function' or"),
        (["mt_turns", "weight=1"], "adv_estimator='mt_turns' takes gamma;"),
        (["OWN:sound", "scal=2"], "did you mean 'scale'"),
        (["OWN:sound", "scale=high"], "options.scale='high'"),
        (["OWN:sound", "scale"], "'scale': expected an option of the function, as in gamma=0.9"),
        (["OWN:sound", "scale={"], "as YAML"),
        (["OWN:sound", "--options", "[1]"], "expected a JSON object"),
        (["OWN:sound", "--timeout-s", "0"], "greater than or equal to 0.1"),
    ],
)
def test_a_request_that_cannot_be_done_ends_with_2(own: Path, words: list[str], says: str) -> None:
    done = run(*(word.replace("OWN", str(own)) for word in words))
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


def test_the_estimators_of_the_page_are_short_and_pass(tmp_path: Path) -> None:
    files = algorithms.page_files(tmp_path)
    assert set(files) == {"my_advantages", *algorithms.ORIGINALS}
    for name, (attribute, _) in algorithms.ORIGINALS.items():
        lines = [line for line in files[name].read_text().splitlines() if line.strip() and line[0] != "#"]
        assert len(lines) <= 15, name
        assert max(map(len, lines)) <= 120, name
        findings = check_advantage(load_function(f"{files[name]}:{attribute}"))
        expected = {"order of siblings"} if name == "rae" else set()
        assert {each.check for each in findings if each.verdict is not Grade.OK} == expected, name
