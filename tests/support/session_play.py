"""Random agents in a session: they go on, fork, retry, rewrite, compact, lose answers and send control tokens.

`play` runs one session on a scripted engine and returns the rules that it breaks. It is there for the property tests.
It does not know how rows are built: it looks at the engine's inputs and outputs, at the agent's answers, and at the
rows.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_multiturn.certificate.check import CertificateRow, verify
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts
from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.turns import CallParser
from verl_multiturn.chat.template_form import TemplateForm
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError
from verl_multiturn.proxy.sessions.nodes import CompletionNode
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rows.keys import RowKey

TOOL = "measure"
STOP = "STOPq7"
_FAR = 100_000
_AUTHORED = ("system", "developer", "assistant")


def schema(name: str, description: str = "Measure a word.") -> dict[str, Any]:
    """Return the schema of a tool with a text and a number."""
    properties = {"word": {"type": "string"}, "count": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True)
class PlayedChat:
    """A model's chat, and the model's texts in it."""

    tokenizer: Any
    codec: ChatCodec
    parser: CallParser
    end_ids: Sequence[int]
    turns: Sequence[str]
    """Turns of the model: answers, calls, calls that cannot be read; each with its end token or without."""
    texts: Sequence[str]
    """Texts of agents: harmless texts and attacks."""
    tools: Sequence[Sequence[dict[str, Any]]] = ((), (schema(TOOL),), (schema(TOOL), schema("other")))
    """The lists of tools that agents may send."""
    roles: list[TemplateForm] = field(default_factory=list)


def certified(outcome: Outcome, receipts: Sequence[Receipts], trained: Sequence[str] | None = None) -> list[str]:
    """Return all violations of the rows of a session, and of how they belong together.

    Args:
        outcome: The session's outcome.
        receipts: The receipts of its rows.
        trained: The roles that are trained; None: there are none.
    """
    found = [str(each) for each in unjoined({RowKey("u", "0", str(own.row)): own for own in receipts}, trained)]
    for row, own in zip(outcome.rows, receipts, strict=True):
        written = row.trajectory
        ids, first = np.array(written.ids), written.prompt_length
        columns = (np.array(column) for column in (written.mask, written.logprobs, written.versions))
        row_of_batch = CertificateRow(
            ids[:first],
            ids[first:],
            *columns,
            whole=True,
            turn_ids=np.array(written.turn_ids),
            sources=np.array(written.sources),
        )
        found += map(str, verify(row_of_batch, own))
    return found


class _Engine:
    """An engine that returns random turns, after a while, and now and then fails once."""

    def __init__(self, chat: PlayedChat, chance: random.Random) -> None:
        self._chat = chat
        self._chance = chance
        self._failed_in: set[str] = set()
        self._version = 0

    async def generate(self, ask: Ask) -> Generation:
        """Return a turn."""
        chance = self._chance
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if ask.request_id not in self._failed_in and chance.random() < 0.03:
            self._failed_in.add(ask.request_id)
            raise EngineError("scripted")
        self._failed_in.discard(ask.request_id)
        text = chance.choice(self._chat.turns)
        if self._chat.tokenizer.decode(list(ask.ids[-16:])).rstrip().endswith("<think>") and "</think>" not in text:
            text = f"thought\n</think>\n\n{text}"
        said = self._chat.tokenizer.encode(text, add_special_tokens=False)
        kept = said[: ask.max_new_tokens]
        self._version += chance.randrange(2)
        logprobs = [-chance.random() for _ in kept]
        return Generation(kept, logprobs, [self._version] * len(kept), "length" if len(kept) < len(said) else "stop")


@dataclass
class _Chat:
    """A conversation as the agent keeps it."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    got: Completion | None = None


class _Agent:
    """An agent with random actions."""

    def __init__(self, chat: PlayedChat, run: ProxyRun, chance: random.Random) -> None:
        self.session = AgentSession("play", run, {"temperature": 1.0})
        self.received: set[str] = set()
        """Ids of the completions that the agent got."""
        self.read: set[str] = set()
        """Ids of those that it read, though the server was informed that it had gone."""
        self.sent_back: set[str] = set()
        """Contents of the completions that it went on from, also where no completion came of that."""
        self.done: Counter[str] = Counter()
        self.broken: list[str] = []
        self._chat = chat
        self._chance = chance
        self._chats: list[_Chat] = []
        self._looked_at: set[int] = set()

    def _nodes(self) -> list[CompletionNode]:
        return list(self.session.forest.completions.values())

    def _text(self) -> str:
        return self._chance.choice(self._chat.texts)

    def _begin(self) -> _Chat:
        messages: list[Message] = []
        for _ in range(self._chance.choice([0, 0, 1, 2])):
            messages.append({"role": self._chance.choice(["system", "developer"]), "content": self._text()})
        if self._chance.random() < 0.3:
            messages += [{"role": "user", "content": self._text()}, {"role": "assistant", "content": self._text()}]
        messages.append({"role": "user", "content": self._text()})
        if self._chance.random() < 0.1:
            messages.append({"role": "system", "content": self._text()})
        return _Chat(messages, self._chance.choice(self._chat.tools))

    def _echo(self, got: Completion) -> Message:
        """Return a completion as one of many clients would send it back."""
        chance = self._chance
        text = got.content
        if got.stop is not None and chance.random() < 0.5:
            text += got.stop
        echoed: Message = {"role": "assistant", "content": text}
        if not text:
            echoed |= chance.choice([{}, {"content": None}])
        if got.reasoning and chance.random() < 0.5:
            echoed["reasoning_content"] = got.reasoning
        if got.calls:
            ids, spaced = chance.random() < 0.8, chance.random() < 0.5
            echoed["tool_calls"] = [
                {
                    **({"id": call.id} if ids else {}),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(json.loads(call.arguments), sort_keys=True, indent=1)
                        if spaced
                        else call.arguments,
                    },
                }
                for call in got.calls
            ]
        return echoed

    def _following(self, got: Completion) -> list[Message]:
        named = self._chance.random() < 0.8
        answers: list[Message] = [
            {"role": "tool", "content": self._text(), **({"tool_call_id": call.id} if named else {})}
            for call in got.calls
        ]
        if not answers or self._chance.random() < 0.2:
            answers.append({"role": "user", "content": self._text()})
        if self._chance.random() < 0.05:
            answers.append({"role": "system", "content": self._text()})
        return answers

    def _next(self) -> _Chat:
        """Return the next request."""
        chance = self._chance
        ready = [chat for chat in self._chats if chat.got is not None]
        move = chance.choices(["begin", "go on", "again", "rewrite", "compact", "tools"], [2, 8, 2, 1, 1, 1])[0]
        if not self._chats or (move == "go on" and not ready):
            move = "begin"
        self.done[move] += 1
        if move == "begin":
            return self._begin()
        if move == "go on":
            # From the last one most often; from an earlier one it is a fork.
            chat = ready[-1] if chance.random() < 0.6 else chance.choice(ready)
            assert chat.got is not None
            self.sent_back.add(chat.got.content)
            return _Chat([*chat.messages, self._echo(chat.got), *self._following(chat.got)], chat.tools)
        chat = chance.choice(self._chats)
        if move == "again":
            return _Chat(chat.messages, chat.tools)
        if move == "rewrite":
            messages = [dict(message) for message in chat.messages]
            messages[chance.randrange(len(messages))]["content"] = f"rewritten {self._text()}"
            return _Chat(messages, chat.tools)
        if move == "compact":
            return _Chat([{"role": "user", "content": f"Summary: {self._text()}"}], chat.tools)
        return _Chat(chat.messages, chance.choice(self._chat.tools))

    async def ask(self) -> None:
        """Ask for something, and get it or not."""
        chance, chat = self._chance, self._next()
        request = ChatRequest(
            [dict(message) for message in chat.messages],
            chat.tools,
            n=chance.choices([1, 2, 3], [10, 1, 1])[0],
            stop=[STOP] if chance.random() < 0.3 else [],
            max_tokens=chance.choice([2, 5]) if chance.random() < 0.15 else None,
            logprobs=chance.random() < 0.1,
            reads_calls=chance.random() < 0.95,
        )
        # The agent certainly has the completion that it went on from before.
        known = {node.parent.completion.id for node in self._nodes() if node.parent} & self.read
        delivery = self.session.begin(request)
        early, lost = chance.random() < 0.05, chance.random() < 0.1
        if early:
            self.done["left early"] += 1
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            delivery.undelivered()
            return
        try:
            await delivery.ready()
        except RefusedError as error:
            self.done[f"refused: {error.code}"] += 1
            if error.code != "context_length_exceeded":
                self.broken.append(f"{error.code}: {error.message}"[:300])
            return
        if lost:
            self.done["lost"] += 1
            delivery.undelivered()
            if chance.random() < 0.3:  # the server is wrong: the agent has read the answer, and goes on from it
                self.done["lost and read"] += 1
                self.read.update(got.id for got in delivery.completions)
                self._chats.append(_Chat(chat.messages, chat.tools, chance.choice(delivery.completions)))
            return
        delivery.delivered()
        if len(delivery.completions) != request.n:
            self.broken.append(f"{len(delivery.completions)} completions where {request.n} were asked for")
        for got in delivery.completions:
            if got.id in self.received or got.id in known:
                self.broken.append("one completion answers two requests")
            self.received.add(got.id)
            self._look(got)
        self._chats.append(_Chat(chat.messages, chat.tools, chance.choice(delivery.completions)))

    def _look(self, got: Completion) -> None:
        """Compare the control tokens of a prompt with those of harmless messages."""
        prompt = self.session.forest.completions[got.id].prompt
        if id(prompt) in self._looked_at:
            return
        self._looked_at.add(id(prompt))
        codec, roles = self._chat.codec, self._chat.roles[0]
        firewall = codec._firewall
        assert firewall is not None
        count = "system" if any(message["role"] in _AUTHORED for message in prompt.messages) else "tool"
        harmless = [_harmless(message) for message in prompt.messages]
        tools = codec.trusted_schemas([_harmless_schema(tool) for tool in prompt.tools])
        if prompt.parent is None or prompt.trie_node is None:  # without one, the whole request was rendered
            found, expected = prompt.ids, codec.rendered(codec.trusted(roles.prompt(harmless)), tools)
        else:
            said = prompt.parent.said
            before = [{"role": "assistant", "content": "x", **roles.assistant_fields(said)}]
            added = codec.trusted(roles.added(harmless, said))
            made = codec.observation(before, added, prompt.parent.generation.ids, tools)
            found, expected = prompt.added, made.observation
        if firewall.count(found, count) != firewall.count(expected, count):
            self.broken.append(f"a text became a control token: {prompt.messages!r}"[:400])


def _harmless(message: Message) -> Message:
    """Return a message of the same form with nothing but harmless text."""
    made = {**message, "content": "x" if message.get("content") else message.get("content")}
    if made.get("reasoning_content"):
        made["reasoning_content"] = "x"
    if made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _harmless_arguments(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made


def _harmless_arguments(text: str) -> str:
    return json.dumps({key: "x" if isinstance(value, str) else value for key, value in json.loads(text).items()})


def _harmless_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "description": "x"}}


async def play(
    chat: PlayedChat, chance: random.Random, requests: int, **settings: Any
) -> tuple[list[str], Counter[str]]:
    """Run a session of about `requests` requests.

    Args:
        chat: The model's chat.
        chance: Decides everything.
        requests: How many requests are made, some at once.
        settings: Settings of `ProxyRun`.

    Returns:
        The rules that the session breaks, and counts of its actions.
    """
    renderer = PromptRenderer(chat.codec, chat.end_ids)
    if not chat.roles:
        chat.roles.append(TemplateForm(chat.codec))
    engine = ReceiptingEngine(StopTexts(_Engine(chat, chance), chat.tokenizer))
    reader = TurnReader(chat.parser, chat.tokenizer, chat.end_ids, [THINK])
    length = chance.choice([60, 600, _FAR])
    run = ProxyRun(engine, renderer, reader, Limits(_FAR, length), fill_id=chat.end_ids[0], **settings)
    agent = _Agent(chat, run, chance)
    asked = 0
    while asked < requests:
        at_once = chance.choice([1, 1, 1, 2, 4])
        try:
            await asyncio.gather(*(agent.ask() for _ in range(at_once)))
        except ConfigError as error:
            agent.broken.append(f"a mistake of the author: {error}"[:300])
        asked += at_once
    session = agent.session
    session.end()
    await session.closed()
    renderer.close()
    outcome = session.outcome(StopReason.FINISHED)
    broken = [*agent.broken, *_checked(agent, outcome, run.max_rows)]
    receipts = Receipts.of_rows(session.id, session.receipts(), outcome.places, "u", 0, False, not outcome.valid)
    broken += certified(outcome, receipts)
    agent.done["rows"] += len(outcome.rows)
    return broken, agent.done


def _checked(agent: _Agent, outcome: Outcome, max_rows: int | None) -> list[str]:
    """Check that the agent's completions are trained once, and nothing else."""
    broken = []
    echoed = {node.parent.completion.id for node in agent.session.forest.completions.values() if node.parent}
    places = dict(zip(range(len(outcome.places)), outcome.places, strict=True))
    for name, node in agent.session.forest.completions.items():
        place = places.pop(node.number)
        got = name in agent.received or name in echoed
        trained = isinstance(place, int) or (place == "dropped_row" and bool(max_rows))
        # It, or one of the same words, may have been sent back by a request that was refused or abandoned.
        fits = trained if got else place == "undelivered" or (trained and node.completion.content in agent.sent_back)
        if not fits:
            broken.append(f"completion {node.number} is in {place!r}, and the agent got it: {got}")
    broken += [f"generation {number} is in {place}" for number, place in places.items() if isinstance(place, int)]
    for index, row in enumerate(outcome.rows):
        listed = [turn for turn in outcome.turns if turn.place == index]
        if row.trajectory.turns != len(listed):
            broken.append(f"{row.trajectory.turns} turns are trained, {len(listed)} are listed")
        if sum(row.trajectory.mask) != sum(turn.end - turn.start for turn in listed):
            broken.append(f"the turns of row {index} do not hold its tokens")
    return broken
