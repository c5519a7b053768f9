"""Episodes with an interaction under examination: a player with fixed actions, and the interaction's answers.

Invariant: two episodes with the same kwargs have the same actions, so that they can be compared.
"""

from __future__ import annotations

import copy
import random
import re
import string
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from verl_multiturn.calls.limits import CallLimits, limits_of
from verl_multiturn.checking.method_calls import CallProbe, ProbeResult
from verl_multiturn.describe import did_you_mean, message_of, place_of_function, show
from verl_multiturn.errors import InteractionContractError
from verl_multiturn.interactions.base import Interaction, Reply
from verl_multiturn.interactions.old_verl.classes import AdaptedInteraction
from verl_multiturn.interactions.running.registry import default_name
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError, read_reply, read_score
from verl_multiturn.interactions.running.session import interaction_owner

_MOST_REWARDS = 8
_UNKNOWN_FIELD = re.compile(r"Reply\.__init__\(\) got an unexpected keyword argument '(\w+)'")


class PolicyStandIn:
    """The model that is being trained, for an interaction that asks it: it always writes the same."""

    async def write(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, sampling: Mapping[str, Any]) -> str:
        """Return a fixed text.

        Args:
            messages: Not used.
            max_tokens: Not used.
            sampling: Not used.
        """
        return "I see."


@dataclass(frozen=True)
class MethodFault:
    """A fault of a method; it is false where there is none.

    Attributes:
        said: What is wrong.
        kind: Its kind, by which the advice is found: `late`, `outage`, `raised`, `type`, `field`, `number` or `over`.
        remedy: A remedy for this very fault; "" to take the advice of its kind.
    """

    said: str = ""
    kind: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.said != ""


NO_FAULT = MethodFault()


@dataclass
class PlayedEpisode:
    """The answers of an interaction in one conversation."""

    answers: list[tuple[str, float | None, str | None, bool, bool]] = field(default_factory=list)
    """Text, reward, state, done and truncated of each answer; the first is that of `start`."""
    unreadable: int = 0
    """Number of turns in which an environment found no action, by its metrics."""
    score: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """Rewards by role, where `score` gave such ones."""
    failure: str = ""
    """Description of the failure, with the method's name; "" if there was none."""

    def add(self, reply: CheckedReply) -> None:
        """Add an answer."""
        self.answers.append((reply.text, reply.reward, reply.state, reply.done, reply.truncated))
        self.unreadable += bool(reply.metrics.get("unreadable_actions"))

    @property
    def shown_score(self) -> str:
        """Return the score in words: of rewards by role each."""
        return ", ".join(f"{role} {reward}" for role, reward in self.scores.items()) or str(self.score)

    @property
    def turns(self) -> int:
        """Return the number of the model's turns that were answered."""
        return max(0, len(self.answers) - 1)

    @property
    def is_over(self) -> bool:
        """Return whether an answer ended the conversation."""
        return any(done or truncated for *_, done, truncated in self.answers)

    @property
    def rewards(self) -> list[float]:
        """Return the distinct rewards of its turns, the smallest first."""
        return sorted({reward for _, reward, *_ in self.answers[1:] if reward is not None})

    def reached_nothing(self) -> bool:
        """Return whether the model's turns came to no reward above 0, and to no end; a penalty is nothing reached."""
        rewards = [self.score, *self.scores.values(), *self.rewards]
        return not self.is_over and not any(reward is not None and reward > 0 for reward in rewards)

    def in_words(self) -> str:
        """Return its turns, its end and its rewards. Example: `8 turns, done, rewards -0.2, 0, 1`."""
        *_, done, truncated = self.answers[-1]
        how = "done" if done else "truncated" if truncated else "goes on"
        said, found = [f"{value:.6g}" for value in self.rewards], "no reward"
        if said:
            listed = ", ".join(said) if len(said) <= _MOST_REWARDS else f"from {said[0]} to {said[-1]}"
            found = f"reward{'s' if len(said) > 1 else ''} {listed}"
        return f"{self.turns} turn{'s' if self.turns != 1 else ''}, {how}, {found}"

    def difference(self, other: PlayedEpisode) -> str:
        """Return the first difference from another episode, in words; "" if the two are one."""
        if self.failure or other.failure:
            return f"{self.failure or 'nothing failed'}, then {other.failure or 'nothing failed'}"
        names = ("text", "reward", "state", "done", "truncated")
        for turn, (mine, theirs) in enumerate(zip(self.answers, other.answers, strict=False)):
            for name, value, changed in zip(names, mine, theirs, strict=True):
                if value != changed:
                    where = f"turn {turn}" if turn else "start"
                    return f"{where}: {name} {show(value, 80)}, then {show(changed, 80)}"
        if len(self.answers) != len(other.answers):
            return f"{self.turns} turns, then {other.turns}"
        return "" if self.shown_score == other.shown_score else f"score {self.shown_score}, then {other.shown_score}"


class InteractionProbe(CallProbe):
    """An interaction under examination.

    Args:
        interaction: The interaction.
        kwargs: A row's kwargs for it.
        actions: The player's texts, turn by turn, and again from the first; empty to draw it.
        rounds: Largest number of turns of an episode.
        timeout_s: As in `check_interaction`.
    """

    def __init__(
        self,
        interaction: Interaction,
        kwargs: Mapping[str, Any],
        actions: Sequence[str],
        rounds: int,
        timeout_s: float | None,
    ) -> None:
        interaction.name = interaction.name or default_name(type(interaction))
        super().__init__(interaction_owner(interaction), timeout_s)
        self.interaction = interaction
        self.kwargs = dict(kwargs)
        self.rounds = rounds
        config = getattr(interaction, "config", None)
        self.writes_letters = not (actions or _known_actions(config))
        self._actions = list(actions) or drawn_actions(config, rounds)
        if interaction.policy is None:
            interaction.policy = PolicyStandIn()

    def attributes(self) -> Iterable[tuple[str, Any]]:
        """Return the names and values of the interaction's attributes."""
        interaction = self.interaction
        own = interaction.old if isinstance(interaction, AdaptedInteraction) else interaction
        return list(getattr(own, "__dict__", {}).items())

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> InteractionProbe:
        """Return the same interaction and player with the kwargs of another row."""
        actions = [self.action(turn) for turn in range(self.rounds)]
        return InteractionProbe(self.interaction, kwargs, actions, self.rounds, self.timeout_s)

    def action(self, turn: int) -> str:
        """Return the player's text in a turn; the first is 0."""
        return self._actions[turn % len(self._actions)]

    def kwargs_of(self, method: str, arguments: tuple[Any, ...]) -> Mapping[str, Any]:
        """Return a copy of the row's kwargs for `start` and `reply`.

        Args:
            method: Name of the method.
            arguments: Positional arguments of the call.
        """
        return copy.deepcopy(self.kwargs) if method in ("start", "reply") else {}

    def read(self, method: str, outcome: ProbeResult) -> tuple[CheckedReply | None, MethodFault]:
        """Read the result of `start` or `reply`, and return its fault.

        Args:
            method: Name of the method.
            outcome: How the call ended.
        """
        if outcome.error is not None:
            return None, _failed(outcome)
        if method == "start" and outcome.value is None:
            return CheckedReply(), NO_FAULT
        most = limits_of(self.interaction, CallLimits).response_characters
        try:
            reply = read_reply(self.interaction.name, method, outcome.value, most)
        except InteractionContractError as error:
            return None, self._wrong(method, str(error), "field" if isinstance(outcome.value, Reply) else "type")
        except InteractionFailedError as error:
            return None, self._wrong(method, str(error), "number")
        if method == "start" and (reply.done or reply.truncated):
            return None, self._wrong(method, "it was over before the model's first turn", "over")
        return reply, NO_FAULT

    def _wrong(self, method: str, said: str, kind: str) -> MethodFault:
        """Return the fault of a value that a method returned, with the place of the method."""
        return MethodFault(f"{said}{place_of_function(getattr(self.interaction, method))}", kind)

    def read_score(self, episode: PlayedEpisode, outcome: ProbeResult) -> MethodFault:
        """Put the result of `score` into an episode, and return its fault.

        Args:
            episode: The episode.
            outcome: How the call ended.
        """
        if outcome.error is not None:
            return _failed(outcome)
        try:
            episode.score, episode.scores = read_score(self.interaction.name, outcome.value)
        except (InteractionContractError, InteractionFailedError) as error:
            return self._wrong("score", str(error), "type" if isinstance(error, InteractionContractError) else "number")
        return NO_FAULT

    async def play(self, episode: PlayedEpisode, instance_id: str | None = None) -> dict[str, MethodFault]:
        """Play an episode to its end, and close it.

        Args:
            episode: An empty one, to which the answers are added.
            instance_id: Id of the conversation; None to make one.

        Returns:
            The fault of each method that was called; `NO_FAULT` where it has none.
        """
        given = instance_id or uuid.uuid4().hex
        problems: dict[str, MethodFault] = {}
        try:
            opening, problems["start"] = self.read("start", await self.call("start", given))
            if opening is None:
                return problems
            episode.add(opening)
            messages: list[dict[str, Any]] = [{"role": "user", "content": opening.text or "Begin."}]
            for turn in range(self.rounds):
                messages.append({"role": "assistant", "content": self.action(turn)})
                seen = [dict(message) for message in messages]
                reply, problems["reply"] = self.read("reply", await self.call("reply", given, seen))
                if reply is None:
                    return problems
                episode.add(reply)
                if reply.done or reply.truncated:
                    break
                messages.append({"role": "user", "content": reply.text})
            problems["score"] = self.read_score(episode, await self.call("score", given))
            return problems
        finally:
            problems["close"] = _failed(await self.call("close", given))
            episode.failure = next((f"{method}: {fault.said}" for method, fault in problems.items() if fault), "")


def _failed(outcome: ProbeResult) -> MethodFault:
    """Return the fault of a call that did not return."""
    error = outcome.error
    unknown = _UNKNOWN_FIELD.search(message_of(error)) if isinstance(error, TypeError) else None
    if unknown is None:
        return MethodFault(outcome.failure(), outcome.kind)
    names = [each.name for each in fields(Reply)]
    hint = did_you_mean(unknown[1], names)
    remedy = f"{hint and hint + ' '}a Reply takes {', '.join(names)}; `done` ends the conversation"
    return MethodFault(outcome.failure(), outcome.kind, remedy)


def drawn_actions(config: Any, rounds: int) -> list[str]:
    """Draw actions, always the same: from the `actions` of an interaction's config, otherwise words of letters.

    Args:
        config: The interaction's config.
        rounds: Their number.
    """
    draw = random.Random(0)
    if names := _known_actions(config):
        return [draw.choice(names) for _ in range(rounds)]
    return ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 8))) for _ in range(rounds)]


def _known_actions(config: Any) -> list[str]:
    known = config.get("actions") if isinstance(config, Mapping) else None
    return list(map(str, known)) if isinstance(known, Sequence | Mapping) and not isinstance(known, str) else []
