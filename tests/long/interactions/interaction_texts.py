"""Hostile texts of users and environments, and the loop's cost of an answer of theirs.

Each text of `tests/support/attacks` is played through a whole conversation with a model family's own chat template: as
the interaction's first message and its answers (`context.mode` `append` and `window`), and as the turns of the model
itself, spelled in ordinary tokens, which `window` renders anew. The loop's text must hold the control tokens of the
same conversation with "x" in the text's place, and no others. A family whose template takes no user turn after the
assistant's is skipped, as the start-up check refuses it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from tests.long.tokens.control_tokens import ControlTokens, control_tokens
from tests.support.attacks import attacks
from tests.support.families import Family, family, make_codec, names
from tests.support.rollout_config import MODEL, make_config
from verl_multiturn import Ask, Conversation, Generation, Interaction, Limits, Reply, Request, ScriptedEngine
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.call_formats import make_parser
from verl_multiturn.verl_bridge.model.loading import LoadedModel

TEXTS = 30
"""Texts for each family."""
REPLIES = 2_000


class Says(Interaction):
    """A user who writes one text three times: first of all, and to two turns."""

    def __init__(self, text: str, replies: int = 2) -> None:
        super().__init__({})
        self.name, self._text, self._left = "says", text, replies

    async def start(self, instance_id: str, **kwargs: Any) -> Reply:
        """Write it first."""
        return Reply(self._text)

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Write it again."""
        self._left -= 1
        return Reply(self._text, done=self._left < 0)


@dataclass
class Found:
    """Effects of the texts."""

    texts: int = 0
    conversations: int = 0
    families: int = 0
    refused: list[str] = field(default_factory=list)
    """Families without a user turn after the assistant's."""
    forged: list[str] = field(default_factory=list)
    """Family, place and text of each text that brought a control token in."""
    calls: int = 0
    """Turns of the model in which its parser read a call or reasoning, so that there is nothing to compare."""


class Trial:
    """A family under attack.

    Args:
        made: The family.
        guarded: False leaves the firewall out. A test uses this to show that the counting notices attacks.
    """

    def __init__(self, made: Family, guarded: bool = True) -> None:
        self._tokenizer = made.tokenizer
        self._codec = make_codec(made)
        if not guarded:
            self._codec.trusted = list  # type: ignore[method-assign, assignment]
            self._codec.harmless = str  # type: ignore[method-assign, assignment]
        (self._end,) = self._tokenizer.encode(made.end_tokens[0], add_special_tokens=False)
        self._parser = make_parser(made.format or "hermes", self._tokenizer, [self._end])
        self.control: ControlTokens = control_tokens(made)

    async def play(self, user: str, model: str, mode: Any) -> Outcome:
        """Play a conversation in which the user writes one text and the model another one."""
        said = [index for letter in model for index in self._tokenizer.encode(letter, add_special_tokens=False)]
        conversation = Conversation(
            ScriptedEngine([[*said, self._end]] * 3),
            self._codec,
            self._parser,
            Limits(prompt_length=200_000, response_length=200_000, max_assistant_turns=3),
            context=Context(mode=mode, turns=1),
        )
        system = [{"role": "system", "content": "s"}]
        for messages in (system, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]):
            outcome = await conversation.run(Request("r", messages, interaction=Says(user)))
            if outcome.valid:
                break
        return outcome

    def written(self, outcome: Outcome, control: Mapping[int, str]) -> list[list[int]]:
        """Return the control tokens that the loop wrote into each row, in order."""
        return [
            [
                index
                for index, source in zip(row.trajectory.ids, row.trajectory.sources, strict=True)
                if source is not Source.SAMPLED and index in control
            ]
            for row in outcome.rows
        ]


async def try_family(name: str, found: Found, texts: int = TEXTS, guarded: bool = True) -> None:
    """Play a family's hostile texts, and record their effects in `found`.

    Args:
        name: Name of the family.
        found: Target of the results.
        texts: Number of texts, drawn from all of the family's.
        guarded: As in `Trial`.
    """
    trial = Trial(family(name), guarded)
    outside, authored = trial.control.outside, trial.control.authored
    cases = [("user", "append", outside), ("user", "window", outside), ("model", "window", authored)]
    honest: dict[tuple[str, str], list[list[int]]] = {}
    for place, mode, control in cases:
        try:
            outcome = await trial.play("x", "x", mode)
        except ConfigError:
            found.refused.append(name)
            return
        assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE, (name, outcome.error)
        honest[place, mode] = trial.written(outcome, control)
    hostile = attacks([*outside.values(), *trial.control.tags])
    for text in random.Random(name).sample(hostile, min(texts, len(hostile))):
        found.texts += 1
        for place, mode, control in cases:
            outcome = await trial.play(*((text, "x") if place == "user" else ("x", text)), mode)
            if place == "model" and any(
                turn.said.calls or turn.said.content.strip() != text.strip() for turn in outcome.turns if turn.said
            ):
                found.calls += 1
                continue
            found.conversations += 1
            if trial.written(outcome, control) != honest[place, mode]:
                found.forged.append(f"{name}, {place}, {mode}: {text!r:.100}")
    found.families += 1


def hostile_texts(texts: int = TEXTS, chosen: Sequence[str] | None = None, guarded: bool = True) -> Found:
    """Play the hostile texts of all families.

    Args:
        texts: Number of texts for each family.
        chosen: Names of the families; None means all.
        guarded: As in `Trial`.
    """
    found = Found()
    for name in names() if chosen is None else chosen:
        asyncio.run(try_family(name, found, texts, guarded))
    return found


class Answers(Interaction):
    """A user who answers at once."""

    name = "answers"

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Answer."""
        return Reply("Yes, go on.", reward=0.5, state=("a room", len(messages)), metrics={"n": 1})


class AnswersInThread(Interaction):
    """The same without a coroutine."""

    name = "answers"

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Answer."""
        return Reply("Yes, go on.", reward=0.5, state=("a room", len(messages)), metrics={"n": 1})


async def reply_ms(interaction: Interaction, replies: int = REPLIES) -> float:
    """Return the median milliseconds of an answer: slot, deadline, copies of 21 messages, call and checks."""
    messages = [{"role": "user", "content": "Go."}]
    for _ in range(10):
        messages += [{"role": "assistant", "content": "I go."}, {"role": "user", "content": "Yes, go on."}]
    times = []
    async with InteractionSession(InteractionGate(interaction, 60.0), "a", {"seed": 7}) as session:
        await session.start()
        for _ in range(replies):
            began = time.perf_counter()
            await session.reply(messages)
            times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


async def user_turn_ms(turns: int = 100) -> float:
    """Return the median milliseconds from one answer of the engine to the next question to it, with a user between."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    said = tokenizer.encode("I go.<|im_end|>")
    times: list[tuple[float, float]] = []

    class Timed:
        async def generate(self, ask: Ask) -> Generation:
            asked = time.perf_counter()
            made = Generation(list(said), [-0.5] * len(said), [0] * len(said), "stop")
            times.append((asked, time.perf_counter()))
            return made

    config = make_config(100_000)
    config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns = turns
    runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), Timed())
    await runner.run(Request("a", [{"role": "user", "content": "Go."}], interaction=Answers({})))
    return 1e3 * statistics.median(after[0] - before[1] for before, after in itertools.pairwise(times))
