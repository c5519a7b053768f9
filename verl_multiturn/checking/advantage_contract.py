"""Contract tests, with which an author finds mistakes in a function of advantages before a run does.

    findings = check_advantage(load_function("my_package.my_module:advantages"))
    assert not [finding for finding in findings if finding.verdict is Grade.PROBLEM]

The function is called as the estimator calls it (`advantages/function.py`), with groups that are made up. The command
line's `check-advantage` prints the same findings.
"""

from __future__ import annotations

import copy
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from verl_multiturn.advantages.function import SLOW_S, AdvantageFunction
from verl_multiturn.advantages.turns import Advantages, GroupMember
from verl_multiturn.checking.examination import CheckResult, Grade
from verl_multiturn.checking.made_groups import EQUAL_SCORE, NEXT_SCORE, GroupMaker, in_rows
from verl_multiturn.describe import show
from verl_multiturn.errors import AdvantageContractError, ConfigError, RewardContractError

TIMEOUT_S = 60.0
"""Seconds after which a call counts as hanging."""
SIBLINGS = 1000
_CLOSE = 1e-6
"""Largest difference of two equal values, relative to the largest of them."""
_ROUNDING = 0.1
"""Largest advantage that may come from a score's rounding alone, where scores differ by 1."""
_POLL_S = 0.01
ADVICE = {
    "values": "return a list with a number for each member, or a list with a number for each of its turns",
    "same input": "keep nothing in globals or on the class, and draw nothing; state belongs into a class with "
    "state_dict and load_state_dict",
    "its input": "copy it first: sorted(group, …) instead of group.sort(…)",
    "one sibling": "invalid siblings are not shown, so that one may be alone: return [0.0] for it",
    "equal scores": "add 1e-6 to a deviation before you divide by it, or return 0.0 where all scores are the same",
    "rounding": "scores of 32 bits differ by 1e-7 where they are equal: add 1e-6 to the deviation",
    "huge rewards": "keep to sums, means and deviations; a power or an exponential of a reward overflows",
    "1,000 siblings": "go through the group a fixed number of times, in a loop",
    "a forest": "read `turn.parent`, which may be None, and the number of a turn long before",
    "order of siblings": "let each value depend on its own member and on the group as a whole; return values in the "
    "order of the members",
    "rows": "let `turn.number` give the order: `parent` and `after` end where a row does",
    "invalid siblings": "let the same members have the same values",
    "state": "let state_dict return all that a later call reads, as texts, numbers, lists and dictionaries, and "
    "load_state_dict put it back",
}
"""Advice to the author, by the name of the check."""
RAISED = "let it raise nothing; where it knows certain roles alone, give them: --role NAME"
"""Advice where it raised for ordinary groups, whose role is None unless roles were given."""


def check_advantage(
    function: AdvantageFunction, roles: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> list[CheckResult]:
    """Examine a function of advantages; it is called some hundred times.

    Args:
        function: The function, with its options.
        roles: Roles of the made groups; none: groups have None, and one check more has two names.
        timeout_s: Seconds after which a call counts as hanging.

    Returns:
        One finding for each check, in the order of the checks.
    """
    examination = AdvantageExamination(function, roles)
    thread = threading.Thread(target=examination.run, daemon=True, name="check")
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        began, check = examination.call
        if began and time.monotonic() - began > timeout_s:  # a thread cannot be ended; it goes with the process
            late = CheckResult(check, Grade.PROBLEM, f"a call does not return within {timeout_s:g} s", ADVICE[check])
            return [*examination.findings, late]
    if examination.failure is not None:
        raise examination.failure
    return examination.findings


class AdvantageExamination:
    """All checks of one function, in order. If one of the first two finds a problem, the others are skipped.

    Args:
        function: The function.
        roles: As in `check_advantage`.
    """

    def __init__(self, function: AdvantageFunction, roles: Sequence[str]) -> None:
        self._function = function
        self._maker = GroupMaker(roles)
        self._roles = roles
        self.findings: list[CheckResult] = []
        self.call = (0.0, "")
        """When the call that is under way began (`time.monotonic`; 0.0: none is), and the check that it is for."""
        self.failure: BaseException | None = None
        """An error of ours."""
        self._check = ""
        self._groups = self._maker.ordinary()

    def run(self) -> None:
        """Run all checks."""
        checks: dict[str, Callable[[], str]] = {
            "values": self._values,
            "same input": self._same_input,
            "its input": self._its_input,
            "one sibling": lambda: self._finite([self._maker.group(1), self._maker.group(1, turns=1)]),
            "equal scores": self._equal_scores,
            "rounding": self._rounding,
            "huge rewards": lambda: self._finite(self._maker.huge()),
            "1,000 siblings": self._many,
            "a forest": lambda: self._finite([self._maker.forest()]),
            "order of siblings": self._order,
            "rows": self._rows,
            "invalid siblings": self._invalid,
            "state": self._state,
        }
        try:
            for name, check in checks.items():
                if any(each.verdict is Grade.PROBLEM for each in self.findings[:2]):
                    self._note(Grade.SKIPPED, "", "mend the problem above first", name)
                    continue
                self._check = name
                try:
                    self._note(Grade.OK, check())
                except (AdvantageContractError, ConfigError) as error:
                    is_raised = name == "values" and error.__cause__ is not None
                    self._note(Grade.PROBLEM, str(error), RAISED if is_raised else ADVICE[name])
                except _FaultError as fault:
                    self._note(fault.grade, str(fault), ADVICE[name])
        except BaseException as error:  # raised again in the caller's thread
            self.failure = error

    def _note(self, grade: Grade, found: str, remedy: str = "", name: str = "") -> None:
        self.findings.append(CheckResult(name or self._check, grade, found, remedy))

    def _start(self) -> AdvantageFunction:
        """Return the function as at the start of a run."""
        return self._function.fresh()

    def _starts(self) -> Iterator[AdvantageFunction]:
        """Yield two starts, the second one when the first run is over."""
        yield self._start()
        yield self._start()

    def _of(self, function: AdvantageFunction, group: Sequence[GroupMember]) -> Advantages:
        self.call = (time.monotonic(), self._check)
        try:
            return function.of_group(group, f"{self._check!r}")
        finally:
            self.call = (0.0, "")

    def _finite(self, groups: Sequence[Sequence[GroupMember]]) -> str:
        """Call the function with groups; `of_group` checks that all values are finite numbers."""
        made = [self._of(self._start(), group) for group in groups]
        return f"largest {max(_largest(each) for each in made):.3g}"

    def _values(self) -> str:
        """Report whether values sum to 0, and the largest; neither is a fault."""
        function = self._start()
        made = [self._of(function, group) for group in self._groups]
        if not self._roles:
            for role in ("white", "black"):
                self._of(function, [replace(each, role=role) for each in self._groups[0]])
        by_turns = sum(_is_zero([value for own in each for value in own]) for each in made)
        by_members = sum(_is_zero([math.fsum(own) / len(own) for own in each]) for each in made)
        largest = max(made, key=_largest)
        return (
            f"sum to 0 over the turns in {by_turns} of {len(made)} groups, "
            f"over the conversations' means in {by_members}; largest {_largest(largest):.3g}"
        )

    def _equal_scores(self) -> str:
        made = [self._of(self._start(), self._maker.of_scores([score] * 4)) for score in (0.0, 1.0, 0.1, -3.3)]
        largest = max(map(_largest, made))
        return f"largest {largest:.3g}" if largest else "all 0"

    def _rounding(self) -> str:
        scores = [EQUAL_SCORE, NEXT_SCORE, EQUAL_SCORE, NEXT_SCORE]
        near = self._of(self._start(), self._maker.of_scores(scores))
        same = self._of(self._start(), self._maker.of_scores([EQUAL_SCORE] * 4))
        apart = max(abs(a - b) for x, y in zip(near, same, strict=True) for a, b in zip(x, y, strict=True))
        if apart > _ROUNDING:
            raise _FaultError(f"scores of 0.3 that differ by 3e-8 have {show(near)}, and equal ones {show(same)}")
        return f"largest difference {apart:.2g}"

    def _many(self) -> str:
        began = time.monotonic()
        self._of(self._start(), self._maker.group(SIBLINGS, turns=3))
        seconds = time.monotonic() - began
        if seconds > SLOW_S:
            raise _FaultError(f"{seconds:.0f} s; a run warns above {SLOW_S:.0f} s for a whole step", Grade.WARNING)
        return f"{seconds:.2g} s"

    def _order(self) -> str:
        draw = random.Random(1)
        for group in self._groups:
            order = draw.sample(range(len(group)), len(group))
            made = self._of(self._start(), group)
            other = self._of(self._start(), [group[i] for i in order])
            expected = [made[i] for i in order]
            if not _are_close(other, expected):
                kept = self._function.has_state
                raise _FaultError(
                    f"{_shown(group)} have {show(made)}; in the order {order} they have {show(other)}, expected "
                    f"{show(expected)}" + ("; it keeps a state, which may go from one to the next" if kept else ""),
                    Grade.WARNING if kept else Grade.PROBLEM,
                )
        return "changes nothing"

    def _rows(self) -> str:
        group = [member for each in self._groups for member in each if len(member.turns) >= 3][:6]
        made = self._of(self._start(), group)
        for length, words in ((2, "up to three rows"), (1, "a row for each turn")):
            other = self._of(self._start(), [in_rows(each, length) for each in group])
            if not _are_close(made, other):
                raise _FaultError(
                    f"{_shown(group)} have {show(made)} in one row each, and {show(other)} in {words}", Grade.WARNING
                )
        return "changes nothing"

    def _invalid(self) -> str:
        """Compare a group with and without invalid siblings, and give one whose reward is NaN."""
        group = self._groups[3]
        broken = [replace(each, valid=False) for each in self._groups[4][:2]]
        made = self._of(self._start(), group)
        other = self._of(self._start(), [broken[0], *group, broken[1]])
        if not _are_close(made, other[1:-1]):
            raise _FaultError(f"{_shown(group)} have {show(made)}, and {show(other[1:-1])} beside two invalid ones")
        try:
            self._of(self._start(), [*group, *self._maker.of_scores([math.nan])])
        except RewardContractError:
            return "not shown, and have 0; a reward that is NaN ends the run before the function is called"
        raise _FaultError("a reward that is NaN was let through")

    def _its_input(self) -> str:
        function, changed = self._start(), list[str]()

        def watched(given: list[GroupMember], **options: Any) -> Any:
            before = copy.deepcopy(given)
            returned = function.call(given, **options)
            if given != before:
                changed.append(f"it was given {_shown(before)}, and changed it to {_shown(given)}")
            return returned

        for group in self._groups:
            self._of(replace(function, call=watched), group)
            if changed:
                raise _FaultError(changed[0])
        return "stays as it is"

    def _same_input(self) -> str:
        a, b, *_ = sorted(self._groups, key=len, reverse=True)
        made, again = ([self._of(function, group) for group in (a, b, a)] for function in self._starts())
        # With a state the values of a group may change, and do so in the same way from each start on.
        pairs = zip(made, again, strict=True) if self._function.has_state else [(made[0], made[2])]
        for one, other in pairs:
            if not _are_close(one, other):
                raise _FaultError(f"{_shown(a)} have {show(one)} at first, and {show(other)} later")
        return "same values"

    def _state(self) -> str:
        if not self._function.has_state:
            return "none is kept"
        first, second = self._start(), self._function.fresh()
        for group in self._groups[:4]:
            self._of(first, group)
        state = first.state()
        text = json.dumps(state)
        second.load_state(json.loads(text))
        if (back := second.state()) != state:
            raise _FaultError(f"state_dict() returned {show(state)}, and {show(back)} after load_state_dict() of that")
        for group in self._groups[4:]:
            one, other = self._of(first, group), self._of(second, group)
            if not _are_close(one, other):
                raise _FaultError(
                    f"{_shown(group)} have {show(one)}, and {show(other)} after a restart from {text[:99]}"
                )
        return f"goes on from a checkpoint; {len(text)} bytes"


class _FaultError(Exception):
    """A check found something, which is the message."""

    def __init__(self, found: str, grade: Grade = Grade.PROBLEM) -> None:
        super().__init__(found)
        self.grade = grade


def _largest(values: Advantages) -> float:
    return max((abs(value) for own in values for value in own), default=0.0)


def _is_zero(values: Sequence[float]) -> bool:
    return abs(math.fsum(values)) <= _CLOSE * max(1.0, *map(abs, values))


def _are_close(one: Advantages, other: Advantages) -> bool:
    bound = _CLOSE * max(1e-6, _largest(one), _largest(other))
    return all(abs(a - b) <= bound for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def _shown(group: Sequence[GroupMember]) -> str:
    """Return the rewards of the turns of a group's conversations, as the input that shows a finding."""
    turns = [[round(turn.earned or 0.0, 4) for turn in each.turns] for each in group]
    outcomes = [round(each.outcome, 4) for each in group]
    return f"turns that earned {show(turns)}" + (f" and sessions {show(outcomes)}" if any(outcomes) else "")
