"""Recorded conversations and sessions of several rows: records, statistics and turns stay the same, byte for byte.

The digests were made by this file's own `digest`, before turns became one `Turn`.
"""

import asyncio
import hashlib
import json
import random
from dataclasses import replace
from typing import Any

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, user
from tests.support.records_1 import json_line, record_of
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
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.data import tool_call
from verl_multiturn.observe.metrics import stats_of
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.life import expire
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import SessionReport
from verl_multiturn.rollout.scripted import ScriptedEngine
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer
from verl_multiturn.rollout.turn_rewards import interaction_scores, tool_scores, turns_of

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CONVERSATIONS = """
5dd08d39 9a1ada24 30d1a32e 5b6b9c64 ecd3d8c2 3ff42ea9 b14a17a6 8b6e768c 0597262e 7e3869ec 46d17fef
5f590ae6 efd4a5dc fd6e4392 2b5f0875 5d2aad44 2f0e9c7b 1acad95c 23e52db5 0bf83a8f 986ff1ef 7cac8bae
0b1d5b21 307619bc 1ebeb440 29fd3d12 e04fefb6 9ff39c5b a758d3c4 d7788c11 474352b0 8b1f6e16 84489a01
0dd3c79c f2992408 012f18b3 fdd338c7 0e91c937 1292cfa7 6b51cc2f b352a4e9 649ca7ef dc7b9134 736a35b5
475ee67a aa310c0a 35222708 39619f26 595f90c3 ce12b034 a7f97a89 e93ebaa5 aead2ac5 e14ba6cc 7cb4e7b8
3e5092e2 40cc2db1 97bc9552 39770670 c2982e53
"""
SESSIONS = """
ab7dfa32 c920220d ab82ec1b d7f3551b 6e1d8ba5 fad79524 15d95691 0016fdde 8edd8c43 b3bcdcd2 8bfcaafe
5bd87080 3c12817a 1c97738b 702a2116 719508a6 dc61f90b 13dff27f 56316e1b 3a62b5a4 59afb531 63b1b6f7
a9ab522f 1600048b de817fa5 f97ef0c2 9cf09f93 285a6bb6 2c44b2ac 621d88e2 6bef08aa 6f5bac96 91903658
274c5d64 e4803d5c 18374510 da65ebd4 3d5a6874 220e374b b967cf86 5391ea40 bbc4183d 027fd721 942963b4
d92cb3a1 8bba108a 39f693ea 56a71f73 f24b27e9 f45ca444 111003f8 761332ec b5f192e6 a14feec5 dc33607d
a33827e8 b2d3310a aac5e825 218e7494 9916f8b4
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


async def conversation(seed: int) -> tuple[Outcome, list[Receipts]]:
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
    return outcome, receipts_of(outcome, engine.take(name))


async def session(seed: int) -> tuple[Outcome, list[Receipts]]:
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
    return outcome, receipts_of(outcome, agent.session.receipts())


def receipts_of(outcome: Outcome, generations: Any) -> list[Receipts]:
    return Receipts.of_rows(outcome.request_id, generations, outcome.places, "u", 0, False, not outcome.valid)


def recorded(outcome: Outcome, receipts: list[Receipts]) -> str:
    """Return the record, the statistics, the turns and the rewards of a conversation as text, without its times."""
    outcome.generate_s = outcome.tools_s = outcome.interaction_s = 0.0
    for call in outcome.calls:
        call.seconds = call.queue_s = 0.0
    scores = [tool_scores(outcome, 0.5), interaction_scores(outcome)] if outcome.session is None else []
    values = stats_of(outcome)
    assert values.pop("cache") == (0, 0)  # a scripted engine does not say it
    assert (values.pop("prefill"), values.pop("waited")) == ((0, {}, None), (0.0, 0.0))
    assert values.pop("request_id") == outcome.request_id
    assert values.pop("outages") == []
    stats = json.dumps([values, turns_of(outcome), scores], allow_nan=False)
    return json_line(record_of(outcome, receipts, step=1, uid="u")) + stats


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


async def test_conversations_are_recorded_as_before() -> None:
    found = [digest(recorded(*await conversation(seed))) for seed in range(60)]
    assert found == CONVERSATIONS.split()


async def test_sessions_are_recorded_as_before() -> None:
    found = [digest(recorded(*await session(seed))) for seed in range(60)]
    assert found == SESSIONS.split()
