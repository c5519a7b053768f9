"""Recorded conversations and sessions of several rows: records, statistics and turns stay the same, byte for byte.

The digests are made by this file's own `digest`; a change of the schema makes them anew.
"""

import asyncio
import hashlib
import json
import random
from dataclasses import replace
from typing import Any

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, user
from verl_multiturn import (
    BaseTool,
    Conversation,
    Interaction,
    Limits,
    Outcome,
    Reply,
    Request,
    ToolResponse,
    ToolSchema,
)
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.observe.metrics import stats_of
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.life import Life, expire
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import SessionReport
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer
from verl_multiturn.rollout.turn_rewards import interaction_scores, tool_scores, turns_of
from verl_multiturn.runs.data import tool_call

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CONVERSATIONS = """
8c60fe7e 9423175c 5044d977 13a1aa8d dac83881 3bd43eba 93c52269 e694c83f 38a8b6a2 4c585cef 9f07ed30
f1b29282 93b8291e ae3fb8ad 634ca322 3513059c 9b471c10 93a24ecf cf789436 dd4e9442 5683c8ca b8449dab
452e9ec3 0cc12962 ae206605 512527d2 5f1a44a4 386fa63b 2da59e9d 41edc223 8b5907e4 42d8fb2a 5e8be66f
43fb5719 cf3326d2 c322f02c 189a6e82 60f895b1 86995e74 739cdbd8 3b56b72d 60bda5cd 4a01e59e 9e954eb2
73d2c2cf 24450c2b abad5f3e afd3f6f9 9e8a1023 8193394d 2aa598dc 1811eb85 000e2e1a 11fd2a56 a0f490aa
c4e7f1ad b077eb69 325b293a 1b404a23 13b5b4b1
"""
SESSIONS = """
52736514 d1c01783 c5604cf1 dd42dfec 070f8d8f a94255a8 ba381701 f043e1c0 129a5e63 4c162a71 3b40c85c
19f5f921 d65481a8 15fece1a ae06a129 4cdff19f dd5b5679 327fdd93 5b55113e 55c7d501 ce60ecb3 c5d6121c
a75d2391 f9ae102d 6111b122 fb6d64d4 955ece3c d8d394ce 6280db43 034bcb5a 8be731fe e34d984b cd71cb88
2011817b 8e74b2a6 620036d9 df25d3ce 184597b4 34ccf6ea 36e83c45 562f60e5 67d62a99 b3e98be9 e1706997
66dcb64b 3dbad577 b317f442 3c39fcf7 364d3b68 38c4be61 3ce67612 30d509e6 c93ec4d3 156c52e6 6ffbdcb4
e7ce91d3 e3afad21 2e7bc833 6e9a7dd4 e540989e
"""


class Paid(BaseTool):
    """A tool that pays for each call, and for the conversation."""

    def get_schema(self) -> ToolSchema:
        return ToolSchema.read(SCHEMA, "look")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["what"] == "bad":
            raise OSError("no such thing")
        return ToolResponse(f"seen {parameters['what']}"), len(parameters["what"]) / 8, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 2.0


class Counting(Interaction):
    """A user who counts, pays for some turns, and scores 10."""

    name = "counting"

    def __init__(self, words: int, last: int) -> None:
        super().__init__({})
        self.words, self.last = words, last

    def start(self, instance_id: str, **kwargs: Any) -> Reply | None:
        return Reply("zero", state=0)

    def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        turn = sum(message["role"] == "assistant" for message in messages)
        reward = None if turn % 3 == 0 else turn / 4
        text, done = " ".join([f"n{turn}"] * self.words), turn >= self.last
        return Reply(text, reward=reward, state=turn % 4, done=done, metrics={"turn": turn})

    def score(self, instance_id: str) -> float:
        return 10.0


class Moody(ScriptedEngine):
    """An engine that, at one turn, aborts, returns too much or nothing, lies about log-probabilities, or hangs."""

    def __init__(self, script: Any, mood: str, at: int) -> None:
        super().__init__(script)
        self.mood, self.at, self.asked = mood, at, 0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        made = await super().generate(*args, **kwargs)
        self.asked += 1
        if self.asked - 1 != self.at:
            return made
        if self.mood == "hang":
            expire()  # the time is up now, however quick the machine is
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return replace(made, finish="abort")
        many = {"ids": [7] * 5000, "logprobs": [-1.0] * 5000, "versions": [0] * 5000}
        changes: dict[str, dict[str, Any]] = {
            "abort": {"finish": "abort"},
            "nothing": {"ids": [], "logprobs": [], "versions": []},
            "many": many,
            "lie": {"logprobs": [0.5] * len(made.ids)},
        }
        return replace(made, **changes.get(self.mood, {}))


def turn(draw: random.Random) -> str:
    """Return a generation: calls that work or fail, calls that cannot be read, or words."""
    if draw.random() < 0.5:
        return "".join(
            tool_call("look", {"what": draw.choice(["it", "bad", "all"])}) for _ in range(draw.randint(1, 3))
        )
    return draw.choice(["a", "b c d e", "<tool_call>{oops</tool_call>", "x <|im_start|> y"])


async def conversation(seed: int) -> tuple[Outcome, list[Receipt]]:
    """Roll out a conversation under settings that are drawn."""
    draw = random.Random(seed)
    tokenizer = tiny_tokenizer()
    end = [tokenizer.eos_token_id]
    turns = [tokenizer.encode(turn(draw) + "<|im_end|>") for _ in range(12)]
    mood = draw.choice(["well", "well", "abort", "nothing", "many", "lie", "hang"])
    engine = ReceiptingEngine(Moody(turns, mood, draw.randint(0, 6)))
    mode: Any = draw.choice(["append", "window", "overflow"])
    summary = draw.choice([None, "Sum up."])
    run = Conversation(
        engine,
        ChatCodec(TinyBuilder(tokenizer), end, firewall=Firewall(tokenizer), tokenizer=tokenizer),
        JsonParser(tokenizer, end),
        Limits(
            prompt_length=draw.choice([230, 400]),
            response_length=draw.choice([50, 80, 160, 400]),
            max_assistant_turns=draw.choice([None, 9]),
            max_parallel_calls=draw.choice([1, 2]),
            wall_clock_s=3600.0,
        ),
        context=Context(mode, draw.randint(1, 3), summary, draw.randint(1, 20)),
    )
    name = f"r{seed}"
    asker = draw.choice([None, Counting(draw.choice([1, 15]), draw.randint(2, 12))])
    request = Request(name, [{"role": "user", "content": "Go."}], {"look": Paid({})}, interaction=asker)
    outcome = await run.run(request)
    return outcome, engine.take(name)


async def session(seed: int) -> tuple[Outcome, list[Receipt]]:
    """Play an agent's session whose requests are drawn: it goes on, forks, asks again, leaves and rewards."""
    draw = random.Random(seed)
    texts = ["a", "b b", call_text("add", {"a": 1}), f"c {call_text('add', {'a': 2})}"]

    def say(request_id: str, ids: Any, turn: int) -> list[int]:
        return tiny_tokenizer().encode(draw.choice(texts) + "<|im_end|>")

    def select(views: Any) -> list[str]:
        return [view.id for number, view in enumerate(views) if number % 3 or view.calls]

    limit = draw.choice([None, 1, 2])
    engine = Moody(say, draw.choice(["well", "well", "abort", "nothing", "lie"]), draw.randint(0, 4))
    agent = Agent(make_run(engine, max_rows=limit, select=draw.choice([None, select])), f"s{seed}")
    agent.session._sampler.call_ids._random = random.Random(seed)
    said: list[tuple[list[dict[str, Any]], Any]] = []
    for number in range(draw.randint(1, 8)):
        if said and draw.random() < 0.8:
            asked, got = draw.choice(said[-3:])
            asked = [*asked, echo(got), *answer(got, *("2" for _ in got.calls)), user(f"more {number}")]
        else:
            asked = [user(f"question {draw.randint(0, 2)}")]
        lost = draw.random() < 0.15
        try:
            got = await agent.ask(asked, [ADD], lost=lost)
        except RefusedError:
            break
        if not lost:
            said.append((asked, got))
        if draw.random() < 0.4:
            assert agent.session.reward(got.id, draw.choice([-1.0, 0.0, 0.5]))
    agent.session.end()
    await agent.session.closed()
    await agent.session.select()
    outcome = agent.session.outcome(StopReason.ENGINE_ERROR if agent.session.failed else StopReason.FINISHED)
    outcome.session = SessionReport(len(agent.session.forest.roots), {}, draw.choice([None, 1.0]))
    return outcome, list(agent.session.receipts())


TIMES = {"at", "asked_at", "seconds", "queue_s", "generate_s", "tools_s", "interaction_s"}


def timeless(value: Any) -> Any:
    """Return a record with 0.0 in the place of all times."""
    if isinstance(value, dict):
        return {name: 0.0 if name in TIMES else timeless(each) for name, each in value.items()}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def recorded(outcome: Outcome, generations: list[Receipt]) -> str:
    """Return the record, the statistics, the turns and the rewards of a conversation as text, without its times."""
    outcome.generate_s = outcome.tools_s = outcome.interaction_s = 0.0
    for call in outcome.calls:
        call.seconds = call.queue_s = 0.0
    scores = [tool_scores(outcome, 0.5), interaction_scores(outcome)] if outcome.session is None else []
    values = stats_of(outcome)
    assert values.pop("cache") == (0, 0)  # a scripted engine does not report it
    assert (values.pop("prefill"), values.pop("waited")) == ((0, {}, None), (0.0, 0.0))
    assert values.pop("request_id") == outcome.request_id
    assert values.pop("outages") == []
    turns = turns_of(outcome)
    roles = [turn.pop("role") for row in turns for turn in row]
    stats = json.dumps([values, turns, scores], allow_nan=False)
    life = Life(outcome.request_id, "u", outcome=outcome, generations=generations, step=1)
    record = json.loads(line_of(record_of(life)))
    assert (record.pop("scores"), record.pop("trained")) == ({}, [])  # so of rewards by role
    assert record.pop("status") == "finished"  # records had none when these were kept, and no roles
    roles += [generation.pop("role") for generation in record["generations"]]
    completions = [generation.pop("completion") for generation in record["generations"]]
    if record["session"] is None:
        assert set(completions) <= {None}
    else:
        # A completion that a client got has an id of its own; the digests are older.
        assert completions == [turn.completion for turn in outcome.turns]
        later = {"rewards": {}, "roles": [], "trained": [], "opponents": {}, "task": None, "user": None}
        assert {name: record["session"].pop(name) for name in later} == later
        roles += [request.pop("role") for request in record["session"]["requests"]]
    assert set(roles) == {None}
    return json.dumps(timeless(record)) + stats


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


async def test_conversations_are_recorded_as_before() -> None:
    found = [digest(recorded(*await conversation(seed))) for seed in range(60)]
    assert found == CONVERSATIONS.split()


async def test_sessions_are_recorded_as_before() -> None:
    found = [digest(recorded(*await session(seed))) for seed in range(60)]
    assert found == SESSIONS.split()
