"""The faults that `benchmarks.explain` plants into synthetic runs: 24, and four that make a step late."""

from __future__ import annotations

import random
from typing import Any

from typing_extensions import override

from tests.long.observe.synthetic_records import Called, Played, Size
from tests.long.observe.synthetic_runs import Fault


def _fails(talk: Played, draw: random.Random, share: float, status: str, text: str, seconds: float = 0.05) -> None:
    """Let a call of a conversation end badly; the model's next answer is a guess."""
    if talk.calls and draw.random() < share:
        call = talk.calls[0]
        call.status, call.text, call.seconds = status, text, seconds
        _wrong(talk, draw)


def _wrong(talk: Played, draw: random.Random) -> None:
    talk.right = False
    talk.answer = f"{draw.randint(2000, 9999)}"


class GroupsWrong(Fault):
    """Three quarters of the rows are too hard for the model."""

    symptom = "groups_wrong"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if not talk.validation and talk.row % 4:
            _wrong(talk, draw)


class GroupsRight(Fault):
    """All rows are too easy."""

    symptom = "groups_right"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        talk.right = draw.random() < 0.99
        talk.answer = talk.truth if talk.right else "2000"


class CutByLength(Fault):
    """A third of the conversations has no room for its answer."""

    symptom = "cut"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 0.35:
            talk.stop, talk.right, talk.answer = "response_length", False, ""


class CutByTurns(CutByLength):
    """Half of the conversations uses up its turns."""

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 0.5:
            talk.stop, talk.right, talk.answer = "max_assistant_turns", False, ""


class Malformed(Fault):
    """The format of calls is another one than the model's."""

    symptom = "calls_malformed"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        _fails(talk, draw, 0.4, "malformed", "The call could not be read.")


class Unknown(Fault):
    """The model calls a tool that is not there."""

    symptom = "calls_unknown"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        _fails(talk, draw, 0.3, "unknown_tool", "There is no such tool.")


class Failing(Fault):
    """The tool's service is ill in the second half of the run."""

    symptom = "calls_fail"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if talk.progress > 0.5:
            _fails(talk, draw, 0.4, "error", "ServerError: 500")


class Late(Fault):
    """The tool answers too late."""

    symptom = "calls_late"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        _fails(talk, draw, 0.25, "timeout", "No answer in time.", 10.0)


class Refused(Fault):
    """The arguments do not fit the schema."""

    symptom = "calls_refused"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        _fails(talk, draw, 0.3, "bad_arguments", "expression: expected a text")


class Waiting(Fault):
    """The tool has too few slots."""

    symptom = "calls_wait"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        for call in talk.calls:
            call.queue_s = 4.0 * draw.lognormvariate(0.0, 0.3)


class Vanishing(Fault):
    """The model learns to do without the tool."""

    symptom = "calls_vanish"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 2.2 * talk.progress - 0.4:
            talk.calls = []
            talk.tokens, talk.engine_s, talk.drift = talk.tokens[-1:], talk.engine_s[-1:], talk.drift[-1:]


class OneAnswer(Fault):
    """The model collapses to one answer."""

    symptom = "one_answer"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 1.4 * talk.progress - 0.2:
            talk.answer, talk.right = "42", False


class Guesses(Fault):
    """The model tries one number after another, and learns which is right."""

    symptom = "guesses"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < talk.progress:
            count = draw.randint(5, 8)
            talk.calls = [Called("calculator", {"expression": str(draw.randint(1, 2000))}, "no") for _ in range(count)]
            talk.tokens, talk.engine_s = [8] * (count + 1), [0.4] * (count + 1)
            talk.drift = talk.drift[:1] * (count + 1)


class ValidationBehind(Fault):
    """The training's reward is gamed: the validation stays where it was."""

    symptom = "validation_behind"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if talk.validation:
            talk.right = draw.random() < 0.1
            talk.answer = talk.truth if talk.right else str(draw.randint(2000, 9999))


class EntropyFalls(Fault):
    """The policy narrows, and learns nothing."""

    symptom = "entropy"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        talk.right = draw.random() < 0.4
        talk.answer = talk.truth if talk.right else str(draw.randint(2000, 9999))
        talk.entropy = 0.45 * 0.02**talk.progress


class Drifting(Fault):
    """From the second turn on the trainer computes something else than the engine."""

    symptom = "drift"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        talk.drift = [drift if turn < 1 else 0.3 for turn, drift in enumerate(talk.drift)]


class Stale(Fault):
    """A third of the tokens is too old."""

    symptom = "stale"

    @override
    def plan(self, size: Size) -> None:
        size.mode = "separate_async"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        talk.too_old = 1.0 if draw.random() < 0.3 else 0.0


class _Groups(Fault):
    entry = ""

    @override
    def plan(self, size: Size) -> None:
        size.mode = "separate_async"

    @override
    def finish(self, step: dict[str, Any], groups: list[tuple[str, list[Played]]], draw: random.Random) -> None:
        lost = [(uid, group) for uid, group in groups if draw.random() < 0.35]
        uids = [uid for uid, _ in lost]
        step[self.entry] = {uid: f"{uid}-anew" for uid in uids} if self.entry == "rerolled" else uids
        for _, group in lost:
            for talk in group:
                talk.joined = False


class Rerolled(_Groups):
    """A third of the groups is begun anew."""

    symptom, entry = "rerolled", "rerolled"


class Evicted(_Groups):
    """A third of the groups is thrown away."""

    symptom, entry = "evicted", "evicted"


class Drowned(Fault):
    """A bonus for length is worth more than a right answer."""

    symptom = "reward_drowned"

    @override
    def score(self, talk: Played, draw: random.Random) -> None:
        if not talk.validation:
            talk.parts["tool_score"] = draw.gauss(0.0, 5.0)
            talk.score = talk.parts["compute_score"] + talk.parts["tool_score"]


class FailingRewards(Fault):
    """A third of the rewards raises, and scores 0."""

    symptom = "rewards_fail"

    @override
    def score(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 0.33:
            talk.parts |= {"compute_score": 0.0, "failed": 1.0, "timed_out": 0.0, "outage": 0.0, "unjudgeable": 0.0}
            talk.score = 0.0


class Contradicting(Fault):
    """The advantages of a third of the groups have the wrong sign."""

    symptom = "advantages_contradict"

    @override
    def compare(self, group: list[Played], draw: random.Random) -> None:
        if draw.random() < 0.35:
            for talk in group:
                talk.advantage = -talk.advantage


class FailingAgents(Fault):
    """A third of the agents raises."""

    symptom = "agents_fail"

    @override
    def plan(self, size: Size) -> None:
        size.task = "agent"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if draw.random() < 0.3:
            talk.end, talk.stop = "raised", "agent_error"
            _wrong(talk, draw)


class InNoRow(Fault):
    """The agent's client gives up, and asks again."""

    symptom = "in_no_row"

    @override
    def plan(self, size: Size) -> None:
        size.task = "agent"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        talk.lost = draw.randint(0, 2)


class RowsUnused(Fault):
    """A fifth of the rows always leads to void turns."""

    symptom = "rows_unused"

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if not talk.validation and talk.row % 5 == 0:
            talk.void, talk.untrained = True, "void"


class _Straggler(Fault):
    symptom = "stragglers"
    part = ""
    seconds = 30.0
    """Seconds that one conversation of every second step loses."""

    @override
    def play(self, talk: Played, draw: random.Random) -> None:
        if talk.number == 3 and talk.step % 2 and talk.row % 16 == 5 and not talk.validation:
            self.delay(talk)

    def delay(self, talk: Played) -> None:
        """Make it late."""


class LateEngine(_Straggler):
    """The engine is late with one conversation."""

    part = "engine"

    @override
    def delay(self, talk: Played) -> None:
        talk.engine_s[-1] += self.seconds


class LateTool(_Straggler):
    """The tool is late with one conversation."""

    part = "tool calculator"

    @override
    def delay(self, talk: Played) -> None:
        _with_call(talk).seconds += self.seconds


class LateQueue(_Straggler):
    """A call of one conversation waits for a slot."""

    part = "queue calculator"

    @override
    def delay(self, talk: Played) -> None:
        _with_call(talk).queue_s += self.seconds


class LateReward(_Straggler):
    """The reward function is late with one conversation."""

    part = "reward"

    @override
    def delay(self, talk: Played) -> None:
        talk.reward_s += self.seconds


def _with_call(talk: Played) -> Called:
    if not talk.calls:
        talk.calls = [Called("calculator", {"expression": "1 + 1"}, talk.truth)]
        talk.tokens, talk.engine_s, talk.drift = talk.tokens * 2, talk.engine_s * 2, talk.drift * 2
    return talk.calls[0]


FAULTS = (
    GroupsWrong, GroupsRight, CutByLength, CutByTurns, Malformed, Unknown, Failing, Late, Refused, Waiting, Vanishing,
    OneAnswer, Guesses, ValidationBehind, EntropyFalls, Drifting, Stale, Rerolled, Evicted, Drowned,
    FailingRewards, Contradicting, FailingAgents, InNoRow, RowsUnused,
)  # fmt: skip
STRAGGLERS = (LateEngine, LateTool, LateQueue, LateReward)
