"""The check of isolation: two conversations of different rows at once are compared with each of them alone.

Invariants:
- a conversation is compared with itself: answers with step rewards, and `calc_reward`, where they are the same twice
  alone;
- the other conversation has another row and other arguments where there are any that the tool takes; the finding names
  them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.checking.examination import Grade
from verl_multiturn.checking.method_calls import ProbeResult
from verl_multiturn.checking.other_rows import Kwargs, made_rows, varied
from verl_multiturn.checking.shared_state import Moment, overwritten
from verl_multiturn.checking.trial_calls import ToolProbe, as_call, reward_of, text_of
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

_CALLS = 2


@dataclass(frozen=True)
class ToolRun:
    """Answers of a tool in one conversation.

    Attributes:
        answers: Text and step reward of each call.
        reward: The result of `calc_reward`, as text.
        has_failed: Whether a method failed; a ValueError is an answer.
    """

    answers: list[tuple[str, str]]
    reward: str
    has_failed: bool

    @classmethod
    def read(cls, name: str, created: ProbeResult, calls: Sequence[ProbeResult], rewarded: ProbeResult) -> ToolRun:
        """Read the outcomes of the calls of a conversation.

        Args:
            name: The tool's name.
            created: Outcome of `create`.
            calls: Outcomes of `execute`.
            rewarded: Outcome of `calc_reward`.
        """
        answers = [(text_of(call, name), reward_of(call)) for call in calls]
        reward = rewarded.failure() or show(rewarded.value)
        outcomes = [created, *calls, rewarded]
        return cls(answers, reward, any(outcome.failure(refusals=False) for outcome in outcomes))


@dataclass(frozen=True)
class _Side:
    """One of the two conversations: its row, its arguments, and its answers alone, twice."""

    probe: ToolProbe
    arguments: Mapping[str, Any]
    alone: tuple[ToolRun, ToolRun]

    def difference(self, played: ToolRun, when: str) -> str:
        """Return how a conversation differs from itself alone, in words; "" where nothing that can be compared does."""
        first, again = self.alone
        if first.answers == again.answers and played.answers != first.answers:
            return f"alone it answers {_said(first.answers)}, {when} {_said(played.answers)}"
        if first.reward == again.reward and played.reward != first.reward:
            return f"alone calc_reward gives {first.reward:.80}, {when} {played.reward:.80}"
        return ""


def _said(answers: list[tuple[str, str]]) -> str:
    """Return answers as they are shown: the texts, with the step rewards where one is not 0."""
    texts: list[Any] = [text if reward == "0.0" else (text, reward) for text, reward in answers]
    return repr(texts)[:150]


class Isolation:
    """The check of one tool.

    Args:
        probe: The tool, with the first row.
        arguments: Arguments of an example call.
        other: Another row's kwargs, from a data set; None to make them.
    """

    def __init__(self, probe: ToolProbe, arguments: Mapping[str, Any], other: Kwargs | None) -> None:
        self._probe = probe
        self._arguments = arguments
        self._other = other

    async def run(self) -> tuple[Grade, str]:
        """Return the verdict and the finding."""
        probe = self._probe
        moments: list[Moment] = []
        probe.moments = moments
        alone = [await _play(probe, self._arguments) for _ in range(2)]
        shown = self._shown(alone[1])
        beside = await self._beside()
        others = [False, False, True] if beside.probe is not probe else [False, False]
        if beside.probe is not probe:
            beside.probe.moments = moments
            await _play(beside.probe, beside.arguments)
            beside.probe.moments = None
        after = await _play(probe, self._arguments)
        probe.moments = None
        state = overwritten(moments, "create", [*others, False])
        first = _Side(probe, self._arguments, (alone[0], alone[1]))
        together = await _together(first, beside)
        if isinstance(together, str):
            return Grade.PROBLEM, f"create gave two conversations the id {together!r}"
        if seen := await self._crossed():
            return Grade.PROBLEM, f"a conversation reads what another one wrote: {seen!r:.200}"
        problems = [first.difference(after, "after another one"), first.difference(together[0], "beside another")]
        problems.append(beside.difference(together[1], "beside another"))
        if problem := next(filter(None, problems), ""):
            return Grade.PROBLEM, problem
        return self._fine(first, beside, state, shown)

    def _fine(self, first: _Side, beside: _Side, state: Mapping[str, str], shown: str) -> tuple[Grade, str]:
        """Return the finding where no answer and no reward shows another conversation."""
        for name, how in state.items():
            return Grade.WARNING, f"self.{name}, which all conversations share, {how}"
        if first.alone[0].answers != first.alone[1].answers:
            if shown:
                return Grade.WARNING, f"each conversation answers otherwise, and {shown} shows in it"
            return Grade.SKIPPED, "answers differ from call to call, so they cannot be compared"
        return Grade.OK, f"two conversations at once answer as one alone{self._differs(beside)}"

    def _differs(self, beside: _Side) -> str:
        """Return how the second conversation differs from the first, as the end of a finding."""
        if beside.probe is not self._probe:
            kind = "another row" if self._other is not None else "made kwargs"
            return f"; the second has {kind}: {show(beside.probe.row, 120)}"
        return "" if beside.arguments == self._arguments else "; the second has other arguments"

    async def _beside(self) -> _Side:
        """Return the second conversation: of another row, and with other arguments, as far as the tool takes them."""
        probe = self._probe
        rows = made_rows(probe.tool, probe.row) if self._other is None else [self._other]
        probes = [made for row in rows if (made := _with_row(probe, row)) is not None]
        other = varied(dict(self._arguments))
        fits = probe.schema.read_arguments(as_call(other))[0] is not None
        for arguments in [other, self._arguments] if fits and other != self._arguments else [self._arguments]:
            for each in [*probes, probe]:
                played = await _unseen(each, arguments)
                if not played.has_failed or (each is probe and arguments is self._arguments):
                    return _Side(each, arguments, (played, await _unseen(each, arguments)))
        raise AssertionError("the first conversation is the last resort")

    async def _crossed(self) -> str:
        """Return the first answer in which a conversation reads words that another one wrote; "" where none does."""
        probe, name = self._probe, self._probe.tool.name
        ids = [(await probe.begin())[0] for _ in range(2)]
        marks = [f"mark{uuid.uuid4().hex}" for _ in ids]
        seen = ""
        for index in (0, 1, 0):
            marked = {key: marks[index] if isinstance(value, str) else value for key, value in self._arguments.items()}
            text = text_of(await probe.call("execute", ids[index], marked), name)
            seen = seen or (text if marks[1 - index] in text else "")
        for instance_id in ids:
            await probe.call("release", instance_id)
        return seen

    def _shown(self, played: ToolRun) -> str:
        """Return the attribute of the shared tool object whose number is in the last answer; empty if there is none."""
        for name, value in self._probe.attributes():
            if isinstance(value, int | float) and not isinstance(value, bool) and str(value) in played.answers[-1][0]:
                return f"self.{name}"
        return ""


def _with_row(probe: ToolProbe, row: Kwargs) -> ToolProbe | None:
    """Return the tool with another row; None where its methods do not take it."""
    try:
        return probe.with_row(row)
    except ConfigError:
        return None


async def _unseen(probe: ToolProbe, arguments: Mapping[str, Any]) -> ToolRun:
    """Play a conversation whose moments are not kept."""
    kept, probe.moments = probe.moments, None
    try:
        return await _play(probe, arguments)
    finally:
        probe.moments = kept


async def _play(probe: ToolProbe, arguments: Mapping[str, Any]) -> ToolRun:
    instance_id, created = await probe.begin()
    calls = [await probe.call("execute", instance_id, dict(arguments)) for _ in range(_CALLS)]
    rewarded = await probe.call("calc_reward", instance_id)
    await probe.call("release", instance_id)
    return ToolRun.read(probe.tool.name, created, calls, rewarded)


async def _together(first: _Side, second: _Side) -> tuple[ToolRun, ToolRun] | str:
    """Play both at once, call by call in turn; return the id where `create` gave them the same."""
    sides = (first, second)
    begun = [await side.probe.begin() for side in sides]
    if begun[0][0] == begun[1][0]:
        await first.probe.call("release", begun[0][0])
        return begun[0][0]
    calls: list[list[ProbeResult]] = [[], []]
    for _ in range(_CALLS):
        for side, (instance_id, _), own in zip(sides, begun, calls, strict=True):
            own.append(await side.probe.call("execute", instance_id, dict(side.arguments)))
    rewarded = [
        await side.probe.call("calc_reward", instance_id) for side, (instance_id, _) in zip(sides, begun, strict=True)
    ]
    for side, (instance_id, _) in zip(sides, begun, strict=True):
        await side.probe.call("release", instance_id)
    name = first.probe.tool.name
    made = [
        ToolRun.read(name, created, own, reward)
        for (_, created), own, reward in zip(begun, calls, rewarded, strict=True)
    ]
    return made[0], made[1]
