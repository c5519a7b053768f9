"""Episodes with an interaction under examination: a player with fixed actions, and the interaction's answers.

Invariant: two episodes with the same kwargs have the same actions, so that they can be compared.
"""

from __future__ import annotations

import copy
import random
import string
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.calls.limits import CallLimits, limits_of
from verl_multiturn.checking.method_calls import CallProbe, ProbeResult
from verl_multiturn.describe import show
from verl_multiturn.errors import InteractionContractError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.old_verl.classes import AdaptedInteraction
from verl_multiturn.interactions.running.registry import default_name
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError, read_reply, read_score
from verl_multiturn.interactions.running.session import interaction_owner


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

    def reached_nothing(self) -> bool:
        """Return whether the model's turns came to no reward above 0, and to no end; a penalty is nothing reached."""
        if any(done or truncated for *_, done, truncated in self.answers):
            return False
        rewards = [self.score, *self.scores.values(), *(reward for _, reward, *_ in self.answers)]
        return not any(reward is not None and reward > 0 for reward in rewards)

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
            return f"{len(self.answers) - 1} turns, then {len(other.answers) - 1}"
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

    def read(self, method: str, outcome: ProbeResult) -> tuple[CheckedReply | None, str]:
        """Read the result of `start` or `reply`, and return its fault.

        Args:
            method: Name of the method.
            outcome: How the call ended.
        """
        if failure := outcome.failure():
            return None, failure
        if method == "start" and outcome.value is None:
            return CheckedReply(), ""
        most = limits_of(self.interaction, CallLimits).response_characters
        try:
            reply = read_reply(self.interaction.name, method, outcome.value, most)
        except (InteractionContractError, InteractionFailedError) as error:
            return None, str(error)
        if method == "start" and (reply.done or reply.truncated):
            return None, "it was over before the model's first turn"
        return reply, ""

    def read_score(self, episode: PlayedEpisode, outcome: ProbeResult) -> str:
        """Put the result of `score` into an episode, and return its fault; "" without one.

        Args:
            episode: The episode.
            outcome: How the call ended.
        """
        if failure := outcome.failure():
            return failure
        try:
            episode.score, episode.scores = read_score(self.interaction.name, outcome.value)
        except (InteractionContractError, InteractionFailedError) as error:
            return str(error)
        return ""

    async def play(self, episode: PlayedEpisode, instance_id: str | None = None) -> dict[str, str]:
        """Play an episode to its end, and close it.

        Args:
            episode: An empty one, to which the answers are added.
            instance_id: Id of the conversation; None to make one.

        Returns:
            The fault of each method that returned wrongly; `""` for each other.
        """
        given = instance_id or uuid.uuid4().hex
        problems: dict[str, str] = {}
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
            problems["close"] = (await self.call("close", given)).failure()
            episode.failure = next((f"{method}: {said}" for method, said in problems.items() if said), "")


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
