"""Recorded conversations and sessions for `benchmarks.replay`, and the replay of each kind.

A world is a setting of a run with the records that it made: those of `honest.py`, several rows, clocks that run
out, images, and sessions of agents.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from omegaconf import OmegaConf

from tests.agent_sessions import call_text, make_run, tiny_template
from tests.harness_requests import PROGRAMS
from tests.integration.vision import CALL, LookTool, Speaker, image, text
from tests.integration.vision_models import picture
from tests.long.tokens.honest import MISHAPS, OURS, SITUATIONS, Guest, Surprises, Unsteady
from tests.support.families import family
from tests.support.on_disk import from_disk
from tests.support.replayed_sessions import drawn, lost_answer, program, replayed, with_engine
from tests.support.rollout_config import make_config
from tests.support.session_play import TOOL as MEASURE
from tests.support.session_play import PlayedChat
from tests.support.template_play import calling_turn
from verl_multiturn import Reply, ScriptedEngine, ToolResponse, ToolSchema
from verl_multiturn.chat.template import SCHEMA, TOOL
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.rollout.life import Life
from verl_multiturn.verl_bridge.loops import runner as runners
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import image_reader
from verl_multiturn.verl_bridge.offline.replay.conversations import Replay, ReplayResult

Play = Callable[[Mapping[str, Any]], Awaitable[ReplayResult]]

MORE: dict[str, dict[str, Any]] = {
    "window": {f"{OURS}.context": {"mode": "window", "turns": 1}},
    "overflow": {"response_length": 160, f"{OURS}.context": {"mode": "overflow", "turns": 1}},
    "overflow with a summary": {
        "response_length": 300,  # an answer fits that leaves no room for a whole summary
        f"{OURS}.context": {"mode": "overflow", "turns": 1, "summary_prompt": "Sum up.", "summary_length": 100},
    },
    "turns are counted": {f"{OURS}.turns_reminder": True, "multi_turn.max_assistant_turns": 4},
    "a user who is cut": {f"{OURS}.user_turn_length": 6},
    "characters": {"multi_turn.max_tool_response_length": 60},
    "clock in a tool": {f"{OURS}.tool_timeout_s": 5, f"{OURS}.request_timeout_s": 0.05},
    "clock in a user who is late": {f"{OURS}.tool_timeout_s": 5, f"{OURS}.request_timeout_s": 0.05},
    "clock in the score of a user": {f"{OURS}.tool_timeout_s": 5, f"{OURS}.request_timeout_s": 0.05},
    "clock in the reward": {f"{OURS}.tool_timeout_s": 5, f"{OURS}.request_timeout_s": 0.05},
}
"""Situations beside those of `honest.py`; a user answers where the name has one."""

SAID = (
    "It is so.<|im_end|>",
    "Let me see. " + call_text(MEASURE, {"word": "a", "count": 1}) + "<|im_end|>",
    "STOPq7 and more<|im_end|>",
    "<tool_call>{</tool_call><|im_end|>",
    "Cut",
)
ASKED = ("What?", "<|im_end|>", "a b")
"""Texts of the model and the agents in drawn sessions."""


@dataclass(frozen=True)
class World:
    """A setting of a run, the records that it made, and the parts that make them again."""

    name: str
    records: list[dict[str, Any]]
    play: Play


class Paid(Surprises):
    """The tool of the honest conversations, with rewards and metrics."""

    def __init__(self, situation: str) -> None:
        super().__init__({}, ToolSchema.read(SCHEMA, "replay"))
        self._is_late = situation == "clock in the reward"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer by the word, with a reward for each character."""
        answer = await super().execute(instance_id, parameters, **kwargs)
        return answer, 0.01 * len(answer.text), {"length": len(answer.text)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Give a reward for the whole, or none in time."""
        await asyncio.sleep(1.0 if self._is_late else 0)
        return 0.5


class Timed(Guest):
    """The user of the honest conversations, who may be late."""

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Answer, or be late the second time."""
        if self._situation.endswith("late") and sum(message["role"] == "assistant" for message in messages) == 2:
            await asyncio.Event().wait()
        said = await super().reply(instance_id, messages, **kwargs)
        return replace(said, done=said.done or (self._situation.startswith("clock in the score") and len(messages) > 4))

    async def score(self, instance_id: str) -> float:
        """Give a score, or none in time."""
        if self._situation.startswith("clock in the score"):
            await asyncio.Event().wait()
        return 1.5


class Mistaken(Unsteady):
    """The engine of the honest conversations, which also calls tools that are not there, with wrong arguments."""

    def _say(self, request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        said = super()._say(request_id, ids, turn)
        chance, template = self._chances[request_id], self._template
        if chance.random() > 0.2:
            return said
        wrong = calling_turn(template, [{"word": "plain", "count": "many" if chance.random() < 0.5 else 1}])
        if not wrong:
            return said
        if chance.random() < 0.5:
            wrong = wrong.replace(TOOL, f"{TOOL}_of_another")
        made: list[int] = template.tokenizer.encode(wrong, add_special_tokens=False)
        return made


@contextmanager
def one_chat_each() -> Iterator[None]:
    """Build the chat of each tokenizer once in a block: it takes a second, and no setting here changes it."""
    known: dict[int, Any] = {}
    make = runners.make_chat

    def made(tokenizer: Any, *args: Any) -> Any:
        if id(tokenizer) not in known:
            known[id(tokenizer)] = make(tokenizer, *args)
        return known[id(tokenizer)]

    with patch.object(runners, "make_chat", made):
        yield


async def record(runner: Runner, row: Mapping[str, Any], sampling: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Roll one conversation out, and return its record, read from disk."""
    request = await runner.request(row, runner.sampling(sampling), name)
    outcome, generations = await runner.run(request)
    return from_disk(Life(outcome.request_id, outcome=outcome, generations=generations, request=request, row=row))


async def conversations(name: str, situation: str, numbers: Iterable[int]) -> World:
    """Roll conversations of a family out in a situation."""
    config = make_config(4000)
    rollout, made = config.actor_rollout_ref.rollout, family(name)
    settings = {"multi_turn.format": made.format, "multi_turn.max_parallel_calls": 2, f"{OURS}.tool_timeout_s": 0.03}
    for key, value in {**settings, **(SITUATIONS | MORE)[situation]}.items():
        OmegaConf.update(rollout, key, value, force_add=True)
    mishaps = MISHAPS if "clock" in situation else MISHAPS[:-1]
    model = LoadedModel(made.tokenizer, made.model_type)
    runner = build_runner(config, model, Mistaken(name, mishaps))
    guest, tools = Timed(situation), {TOOL: Paid(situation)}
    interactions = {guest.name: guest} if "user" in situation and "user turn" not in situation else {}
    runner = replace(runner, tools=tools, interactions=interactions)

    def one(number: int) -> Awaitable[dict[str, Any]]:
        row = {"raw_prompt": [{"role": "user", "content": f"Question {number}?"}]}
        return record(runner, row, {"temperature": 1.0, "conversation": number}, f"{name}, {situation}, {number}")

    records = list(await asyncio.gather(*map(one, numbers)))
    replay = Replay(config, model, tools, interactions)
    return World(f"{name}, {situation}", records, replay.play)


async def images(processor: Any, kind: str, numbers: Iterable[int]) -> World:
    """Roll conversations out in which rows and tools show pictures."""
    config = make_config(400)
    config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls = 4
    speaker, read, side = Speaker(), image_reader(processor, {}), 32 if kind == "qwen3_vl" else 28
    model = LoadedModel(processor.tokenizer, kind, processor, read)
    runner = build_runner(config, model, speaker)
    records = []
    for number in numbers:
        chance = random.Random(f"pictures {number}")

        def drawn(chance: random.Random = chance) -> Any:
            return picture(side * chance.randint(1, 6), side * chance.randint(1, 6), chance.randrange(1000))

        said = [f"{CALL}\n{CALL}<|im_end|>", f"{CALL}<|im_end|>", "A cat.<|im_end|>"]
        speaker.scripted = ScriptedEngine([processor.tokenizer.encode(each) for each in said], version=7)
        answers = [ToolResponse("Two.", image=[drawn(), drawn()]), "none", (ToolResponse(image=[drawn()]), 0.5, {})]
        row = {"raw_prompt": [{"role": "user", "content": [text("Compare "), image(drawn()), text(".")]}]}
        tools = {"look": LookTool(answers)}
        records.append(await record(replace(runner, tools=tools), row, {}, f"pictures, {kind}, {number}"))
    replay = Replay(config, model, {"look": LookTool([])})
    return World(f"pictures, {kind}", records, replay.play)


async def programs(count: int) -> World:
    """Record the sessions of agent programs whose requests are kept, and of agents that chance drives."""
    template = tiny_template()
    lengths = {"prompt_length": 65_536, "response_length": 65_536}
    run = make_run(lambda *_: [], **lengths)
    records = [await program(name, run, template, random.Random(name)) for name in PROGRAMS]
    records.append(await lost_answer(PROGRAMS[0], run, template))
    chat = PlayedChat(template.tokenizer, template.codec, template.parser, template.end_ids, SAID, ASKED)
    records += [await drawn(chat, run, template, f"replay {seed}") for seed in range(count)]
    stage = ReplayEngine()
    run = with_engine(run, stage, template)

    async def play(record: Mapping[str, Any]) -> ReplayResult:
        return ReplayResult(str(record["request_id"]), await replayed(dict(record), run, stage))

    return World("sessions", records, play)


async def all_conversations(families: Sequence[str], count: int) -> list[World]:
    """Roll `count` conversations out in every situation, with every family."""
    pairs = [(name, situation) for name in families for situation in (*SITUATIONS, *MORE)]
    return [await conversations(*pair, range(count)) for pair in pairs]
