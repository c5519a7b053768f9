"""The agents of `benchmarks.proxy_fuzz`: requests, messages that they send back, when they leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.long.endpoint.proxy_fuzz_http import Clients, Reply
from tests.long.endpoint.proxy_fuzz_model import NAMES, STOPS, Family, texts
from tests.long.endpoint.proxy_fuzz_wire import (
    CHAT,
    MESSAGES,
    PATHS,
    RESPONSES,
    Ask,
    Message,
    Received,
    RefusedInStreamError,
    read,
)
from verl_multiturn.proxy.sessions.session import AgentSession

MOST_MESSAGES = 14
_WAITS = (0, 1, 2, 3, 5, 8, 20, -1, 0.001, 0.003, 0.01, 0.03)
_BROKEN = (
    b"", b"{", b"[]", b"null", b'{"messages": []}', b'{"messages": [{}], "input": [{}]}', b'{"messages": 5}',
    b'{"messages": [{"role": "user", "content": 7}], "input": [{"role": "user", "content": 7}]}',
    b'{"messages": [{"role": "ghost", "content": "x"}], "input": [{"role": "ghost", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "tools": [{"type": "function"}, {"name": ""}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}], "input": "\xff"}',
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Expected outcome of a request."""

    shown: list[str] = field(default_factory=list)
    """Marks of a client's texts that the model has to read, in order."""
    continues: Known | None = None
    """The completion that it continues honestly."""
    rewrites: Known | None = None
    """A completion that it must not continue, since it was changed."""
    crosses: bool = False
    """Whether only the ids were changed."""
    appended: str | None = None
    """A stop text that the client put back after the turn that it continues."""


@dataclass(eq=False)
class Done:
    """A request that is over, and its client's view."""

    ask: Ask
    status: int
    received: list[Received]
    """Data it got in full."""
    stayed: bool
    """Whether it waited for the answer, and had it before the agent's return."""
    plan: Plan
    error: str = ""
    began: float = 0.0
    """Time of the event loop at which it was sent, in seconds."""
    ended: float = field(default_factory=lambda: asyncio.get_running_loop().time())


@dataclass(frozen=True)
class Known:
    """A completion that a client got, with the request that it answers."""

    ask: Ask
    received: Received
    stop: str | None
    shown: list[str]
    """Marks of the request's texts, in order."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the properties by which another completion is mistaken for this one.

        It follows as many messages: with fewer it is a turn before the client's rewritten part, and is continued
        rightly.
        """
        calls = [(name, json.dumps(json.loads(given), sort_keys=True)) for _, name, given in self.received.calls]
        return (len(self.ask.messages), self.received.content, *calls)


class Fuzzed:
    """One session and all of its clients.

    Args:
        session: The session.
        family: Its model's family.
        clients: The connections.
        seed: Decides everything.
        marks: Makes numbers for marks.
        more: Further things that they do, and how often.
    """

    def __init__(
        self,
        session: AgentSession,
        family: Family,
        clients: Clients,
        seed: str,
        marks: itertools.count[int],
        more: Mapping[Callable[[Fuzzed], Awaitable[None]], int],
    ) -> None:
        self.session = session
        self.family = family
        self.done: list[Done] = []
        self.wrong: list[str] = []
        """Errors on the clients' side."""
        self.requests = 0
        self.closing = False
        """Whether the session may be over already."""
        self._clients = clients
        self.random = random.Random(seed)
        self._marks = marks
        self._known: list[Known] = []
        self._more = more

    async def play(self, requests: int) -> None:
        """Play until so many requests were sent."""
        acts: dict[Callable[[], Awaitable[None]], int] = {
            self._begin: 10, self._continue: 40, self._rewrite: 10, self._return: 14, self._two: 6, self._many: 5,
            self._compact: 3, self._make_up: 6, self._count: 2, self._break: 4, self._end_with_assistant: 2,
        }  # fmt: skip
        acts |= {partial(act, self): weight for act, weight in self._more.items()}
        while self.requests < requests and not self.closing:
            act = self.random.choices(list(acts), list(acts.values()))[0]
            await act()

    # Messages

    def _user(self, shown: list[str]) -> Message:
        mark = f"u{next(self._marks):06d}z"
        shown.append(mark)
        content: Any = f"{texts(self.random, self.family.hostile)} {mark}"
        if self.random.random() < 0.1:
            parts = [texts(self.random, self.family.hostile), content]
            content = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
        return {"role": "user", "content": content}

    def _system(self) -> Message:
        chance = self.random
        return {"role": chance.choice(("system", "developer")), "content": texts(chance, self.family.hostile)}

    def _tools(self) -> list[dict[str, Any]]:
        chance = self.random
        if chance.random() < (0.3 if self.family.tools else 0.8):
            return []
        return [_schema(name, texts(chance, self.family.hostile)) for name in NAMES[: chance.choice((1, 1, 2))]]

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], path: str | None = None) -> Ask:
        """Draw how to ask."""
        chance = self.random
        path = path or chance.choice(PATHS)
        objects = all(
            _is_object(call["function"]["arguments"]) for each in messages for call in each.get("tool_calls") or ()
        )
        if path == MESSAGES and not objects:
            path = CHAT
        stop = tuple(chance.sample(STOPS, chance.choice((1, 1, 2)))) if chance.random() < 0.25 else ()
        return Ask(
            path,
            list(messages),
            tools,
            stop=() if path == RESPONSES else stop,
            max_tokens=chance.choice((0, 1, 3, 8, 20)) if chance.random() < 0.15 else None,
            stream=chance.random() < 0.4,
            logprobs=path == CHAT and chance.random() < 0.1,
            forbids_calls=chance.random() < 0.05,
            more={"temperature": 0.3, "metadata": None} if chance.random() < 0.1 else {},
        )

    def _opening(self) -> tuple[list[Message], list[str]]:
        shown: list[str] = []
        first = [self._system()] if self.random.random() < 0.4 else []
        return [*first, self._user(shown)], shown

    def _echo(self, known: Known) -> tuple[Message, bool, str | None]:
        """Return a completion as a client sends it back, whether that is honest, and the stop text put after it."""
        chance, got = self.random, known.received
        message: Message = {"role": "assistant", "content": got.content or chance.choice((None, ""))}
        if not got.content and chance.random() < 0.2:
            del message["content"]
        honest, appended = True, None
        if got.calls:
            drops, again = chance.random() < 0.2, chance.random() < 0.4
            calls = []
            for index, (name_id, name, given) in enumerate(got.calls):
                if again:
                    loaded = json.loads(given)
                    given = json.dumps(loaded, indent=chance.choice((None, 1)), sort_keys=chance.random() < 0.5)
                    honest = honest and "Infinity" not in given
                own = {} if drops and (index or chance.random() < 0.9) else {"id": name_id}
                calls.append({**own, "type": "function", "function": {"name": name, "arguments": given}})
            message["tool_calls"] = calls
        if got.reasoning and chance.random() < 0.6:
            message["reasoning_content"] = got.reasoning
        if known.stop and not got.calls and isinstance(message.get("content"), str) and chance.random() < 0.5:
            message["content"] += known.stop
            appended = known.stop
        if got.content and message["content"] == got.content and chance.random() < 0.15:
            message["content"] = [{"type": "text", "text": got.content, "cache_control": {"type": "ephemeral"}}]
        if chance.random() < 0.2:
            message |= {"refusal": None, "audio": None, "annotations": [], "unknown": {"a": [1]}}
        return message, honest, appended

    def following(self, known: Known, shown: list[str]) -> list[Message]:
        """Return messages after a completion: answers of tools, users, at times a word of the system."""
        chance = self.random
        added: list[Message] = []
        calls = list(known.received.calls)
        if calls and chance.random() < 0.1:
            calls.pop()
        if chance.random() < 0.1:
            chance.shuffle(calls)
        for call_id, _, _ in calls:
            own = {} if chance.random() < 0.1 else {"tool_call_id": call_id}
            added.append({"role": "tool", **own, "content": texts(chance, self.family.hostile)})
        if chance.random() < 0.06:
            added.append(self._system())
        if not added or chance.random() < 0.2:
            added.append(self._user(shown))
        return added

    def after(self, known: Known) -> tuple[list[Message], Plan]:
        """Return messages that continue a completion, and their expected outcome."""
        echo, honest, appended = self._echo(known)
        shown = list(known.shown)
        messages = [*known.ask.messages, echo, *self.following(known, shown)]
        return messages, Plan(shown, known if honest else None, appended=appended)

    # Actions

    async def _begin(self) -> None:
        messages, shown = self._opening()
        await self.get(self.ask(messages, self._tools()), Plan(shown))

    async def _continue(self) -> None:
        known = self.some()
        if known is None:
            await self._begin()
            return
        messages, plan = self.after(known)
        tools = self._tools() if self.random.random() < 0.05 else known.ask.tools
        ask = self.ask(messages, tools, known.ask.path if self.random.random() < 0.7 else None)
        await self.get(ask, plan if tools == known.ask.tools else Plan(plan.shown))

    async def _rewrite(self) -> None:
        """Change a text of the history: the model has to get the sent text."""
        known = self.some()
        if known is None:
            await self._begin()
            return
        messages, plan = self.after(known)
        shown = plan.shown
        messages = [dict(message) for message in messages]
        at = len(known.ask.messages)
        mark = f"u{next(self._marks):06d}z"
        if not messages[at].get("tool_calls") and self.random.random() < 0.5:
            messages[at] = {"role": "assistant", "content": f"{texts(self.random, self.family.hostile)} {mark}"}
            after = sum(each in str(messages[at + 1 :]) for each in shown)
            shown.insert(len(shown) - after, mark)
        else:
            marked = [
                (index, each)
                for index in range(at)
                if messages[index]["role"] == "user"
                for each in shown
                if each in str(messages[index]["content"])
            ]
            if not marked:  # all of the user's text was cut
                await self._begin()
                return
            index, old = self.random.choice(marked)
            messages[index]["content"] = f"{texts(self.random, self.family.hostile)} {mark}"
            shown[shown.index(old)] = mark
        await self.get(self.ask(messages, known.ask.tools), Plan(shown, rewrites=known))

    async def _compact(self) -> None:
        messages, shown = self._opening()
        known = self.some()
        summary = known.received.content if known is not None else "nothing"
        messages.append({"role": "assistant", "content": summary})
        messages.append(self._user(shown))
        await self.get(self.ask(messages, self._tools()), Plan(shown))

    async def _make_up(self) -> None:
        """Send turns that no model wrote."""
        chance = self.random
        messages, shown = self._opening()
        for _ in range(chance.randint(1, 3)):
            said: Message = {"role": "assistant", "content": texts(chance, self.family.hostile)}
            if chance.random() < 0.4:
                said["reasoning_content"] = texts(chance, self.family.hostile)
            if chance.random() < 0.5:
                name = chance.choice((*NAMES, texts(chance, self.family.hostile) or "f"))
                key, word = texts(chance, self.family.hostile), texts(chance, self.family.hostile)
                given = chance.choice((json.dumps({key: word, "n": [2**70, 1.5, None]}), word, "{}", "[1]", '"x"'))
                call = {"id": chance.choice(("call00001", word)), "type": "function"}
                said["tool_calls"] = [{**call, "function": {"name": name, "arguments": given}}]
                messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": word}]
            else:
                messages += [said, self._user(shown)]
        await self.get(self.ask(messages, self._tools()), Plan(shown))

    async def _return(self) -> None:
        """Leave, once or twice, and mostly come back with the same request."""
        ask, plan = self._fresh()
        if ask.path == CHAT and self.random.random() < 0.15:
            ask = replace(ask, n=self.random.choice((2, 3, 8)))
        for _ in range(self.random.choice((1, 1, 1, 2))):
            cut = self.random.random() if self.random.random() < 0.1 else 1.0
            await self._leave(ask, plan, self.random.choice(_WAITS), cut)
            await asyncio.sleep(0.002)  # a server must learn that a client left
        if self.random.random() < 0.8:
            await self.get(ask, plan)

    async def _two(self) -> None:
        ask, plan = self._fresh()
        await asyncio.gather(*(self.get(ask, plan) for _ in range(self.random.choice((2, 2, 4)))))

    async def _many(self) -> None:
        ask, plan = self._fresh()
        await self.get(replace(ask, path=CHAT, n=self.random.choice((2, 3, 8))), plan)

    async def _count(self) -> None:
        messages, _ = self._opening()
        self.requests += 1
        ask = replace(self.ask(messages, self._tools(), MESSAGES), stream=False)
        reply = await self._post(f"{MESSAGES}/count_tokens", ask.body())
        if reply is not None and reply.status not in (200, 400):
            self.wrong.append(f"count_tokens: {reply.status} {reply.body[:300]!r}")

    async def _break(self) -> None:
        """Send a body that is not a request, or has no key."""
        self.requests += 1
        path, body = self.random.choice(PATHS), self.random.choice(_BROKEN)
        key = self.random.choice((None, None, "wrong", "sk-" + "x" * 300))
        reply = await self._post(path, body, key)
        if reply is not None and reply.status != (400 if key is None else 401):
            self.wrong.append(f"{path} {body!r}: {reply.status} {reply.body[:300]!r}")

    async def _end_with_assistant(self) -> None:
        """Send a request whose last message is the assistant's; and messages without any text."""
        messages, shown = self._opening()
        if self.random.random() < 0.5:
            messages.append({"role": "assistant", "content": texts(self.random, self.family.hostile)})
        else:
            messages += [{"role": self.random.choice(("user", "system", "assistant", "tool")), "content": ""}] * 2
        await self.get(self.ask(messages, ()), Plan(shown))

    # How they do it

    def some(self) -> Known | None:
        """Return a completion that somebody got; None if there is none, or they are too long."""
        some = [known for known in self._known[-12:] if len(known.ask.messages) < MOST_MESSAGES]
        return self.random.choice(some) if some else None

    def _fresh(self) -> tuple[Ask, Plan]:
        """Return a request that no other client sends."""
        known = self.some()
        if known is None or self.random.random() < 0.4:
            messages, shown = self._opening()
            return self.ask(messages, self._tools()), Plan(shown)
        messages, plan = self.after(known)
        messages.append(self._user(plan.shown))
        return self.ask(messages, known.ask.tools, known.ask.path), plan

    async def _post(self, path: str, body: bytes, key: str | None = None) -> Reply | None:
        try:
            return await self._clients.post(path, body, key, half=self.random.random() < 0.1)
        except (ConnectionError, TimeoutError) as error:
            if not self.closing:
                self.wrong.append(f"{path}: {type(error).__name__} {error}")
            return None

    async def get(self, ask: Ask, plan: Plan) -> None:
        """Ask, and wait for the answer."""
        self.requests += 1
        began = asyncio.get_running_loop().time()
        reply = await self._post(ask.path, ask.body())
        if reply is None:
            return
        done = Done(ask, reply.status, [], not self.closing, plan, began=began)
        self.done.append(done)
        if reply.status == 200:
            self._read(done, reply)
            stop = ask.stop[0] if len(ask.stop) == 1 else None
            for each in done.received:
                if all(_is_object(given) for _, _, given in each.calls):
                    self._known.append(Known(ask, each, stop, plan.shown))
                else:
                    self.wrong.append(f"the arguments of a call are no JSON object: {each.calls}")
            if len(done.received) != ask.n and not done.error:
                self.wrong.append(f"asked for {ask.n}, got {len(done.received)}: {reply.body[:300]!r}")
        else:
            done.error = reply.body[:600].decode()
            if reply.status != 400:
                self.wrong.append(f"{ask.path}: {reply.status} {done.error}")

    async def _leave(self, ask: Ask, plan: Plan, after: float | int, sent: float) -> None:
        """Ask and leave."""
        self.requests += 1
        began = asyncio.get_running_loop().time()
        reply = await self._clients.leave(ask.path, ask.body(), after, sent)
        done = Done(ask, reply.status, [], False, plan, began=began)
        self.done.append(done)
        if reply.whole and reply.status == 200:
            self._read(done, reply)

    async def refused(self, ask: Ask, why: str) -> None:
        """Send a request that has to be refused, with these words."""
        self.requests += 1
        reply = await self._post(ask.path, ask.body())
        over = self.closing or self.session.failed
        if reply is not None and (reply.status != 400 or (why.encode() not in reply.body and not over)):
            self.wrong.append(f"{ask.path} {ask.refers}: {reply.status} {reply.body[:300]!r}")

    def _read(self, done: Done, reply: Reply) -> None:
        try:
            done.received = read(done.ask, reply.body)
        except RefusedInStreamError as error:
            done.error = str(error)
        except ValueError as error:
            self.wrong.append(f"{done.ask.path} ({'stream' if done.ask.stream else 'whole'}): {error}")


def _schema(name: str, description: str) -> dict[str, Any]:
    properties = {
        "word": {"type": "string", "description": description},
        "count": {"type": "number", "description": "A number."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        return False
