"""`AgentSession`: the requests of one agent, and the completions that answer them.

    request ─→ its prompt in the forest ─→ samples ─→ Delivery
               (found, continued or new)   (lanes of the engine)

Invariants:
- sampled tokens are never rendered again;
- each generation that the engine returned is in the ledger, and so has a row or a cause in the end;
- an undelivered completion is kept for the next identical request. Two that both wait get two samples;
- no completion becomes a delivered one after the agent's return.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import re
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson

from verl_multiturn.calls.timeline import during
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.opponents.draw import SessionOpponents
from verl_multiturn.proxy.opponents.remote_model import OpponentLostError, RemoteModel
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, ContextLengthError, RefusedError
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.journal import COUNT, Journal, JournalEntry
from verl_multiturn.proxy.sessions.nodes import CompletionNode, PromptNode
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rows import selected, session_outcome
from verl_multiturn.proxy.sessions.sampler import Sampler, engine_failed
from verl_multiturn.proxy.sessions.turn_reading import CallIds
from verl_multiturn.rollout.life import current, stopped
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome

Result = TypeVar("Result")
_OVER = ("session_over", "engine_failed")
"""Codes of refusals after which no request is answered; an agent may go on for as long as it likes."""


@dataclass(eq=False)
class _PendingCompletion:
    """A completion that is being sampled, or that is there."""

    task: asyncio.Task[CompletionNode]

    @property
    def node(self) -> CompletionNode | None:
        """Return the completion; None while there is none."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if done else None

    @property
    def usable(self) -> bool:
        """Return whether a client can still get it: it is under way, or not delivered."""
        return not self.task.done() or (self.node is not None and not self.node.delivered)


@dataclass(eq=False)
class Delivery:
    """The answer to one request. Exactly one of `delivered` and `undelivered` is called, when that is known."""

    session: AgentSession
    request: ChatRequest
    noted: JournalEntry
    completions: Sequence[Completion] = ()
    """The completions, once `ready` has returned."""
    gone: bool = False
    samples: list[_PendingCompletion] = field(default_factory=list)
    prompt: PromptNode | None = None
    task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait for the completions. Cancelling the wait changes nothing; call `undelivered` if the client has gone.

        Raises:
            RefusedError: There are none.
        """
        assert self.task is not None
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise _over()
        self.task.result()

    def delivered(self) -> None:
        """Note that the client has the whole answer. After the agent's return that counts for nothing."""
        if not self.session.has_returned:
            self.session.journal.told(self.noted, True)
            for sample in self.samples:
                self.session.forest.note(sample.task.result(), returned=True, delivered=True)
        self.samples = []

    def undelivered(self) -> None:
        """Note that the client has gone. The next identical request takes its samples, ready or not."""
        self.gone = True
        self.session.journal.told(self.noted, False)
        self.session.keep(self)


class AgentSession:
    """The requests of one agent.

    Args:
        name: Request id of the data row.
        run: State that all sessions share.
        sampling: Sampling parameters, under the engine's own names.
    """

    def __init__(self, name: str, run: ProxyRun, sampling: Mapping[str, Any]) -> None:
        self.id = name
        self.forest = Forest()
        self.roles = run.roles
        self.unenforced: dict[str, int] = {}
        """How often requests had fields that change nothing."""
        self.journal = Journal(lambda: len(self.forest.ledger), has_roles=run.roles is not None)
        self._run = run
        self._sampling = sampling
        self._sampler = Sampler(name, run, self.forest, sampling)
        self.has_returned = False
        """Whether the agent has returned or ended."""
        self._over = False
        self._asked = 0
        self._selected: set[CompletionNode] | None = None
        self._tools: tuple[Sequence[dict[str, Any]], str] = ((), "")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.opponents = SessionOpponents(run.opponents, current())
        self._relayed: dict[str, Completion] = {}
        # The engine stops the clock of the conversation that a task belongs to. A server's tasks belong to none.
        self._context = contextvars.copy_context()

    def name_calls_by(self, ids: CallIds) -> None:
        """Take the ids of calls from another maker, as a replay does."""
        self._sampler.call_ids = ids

    @property
    def failed(self) -> str:
        """Return why the session is invalid; "" while it is not."""
        return self._sampler.failed

    @failed.setter
    def failed(self, said: str) -> None:
        self._sampler.failed = said

    async def complete(self, request: ChatRequest) -> Delivery:
        """Answer a request. The caller reports its outcome to the delivery.

        Raises:
            RefusedError: There is no completion.
        """
        delivery = self.begin(request)
        await delivery.ready()
        return delivery

    def begin(self, request: ChatRequest) -> Delivery:
        """Begin to answer a request; `Delivery.ready` waits for the answer."""
        delivery = Delivery(self, request, self.journal.begin(request, request.protocol))
        for name in request.unenforced:
            self.unenforced[name] = self.unenforced.get(name, 0) + 1
        delivery.task = self._start(self._answer(delivery))
        return delivery

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the engine would be given for a request.

        Raises:
            RefusedError: The request cannot be rendered, or the session is over.
        """
        noted = self.journal.begin(request, COUNT)
        with _noting(noted, request):
            noted.prompt = await self._prompt(request)
        noted.delivered = True
        return noted.prompt.length

    def sent(self, id_: str) -> Completion | None:
        """Return the completion that has an id, or a call with it; None if there is none."""
        node = self.forest.completions.get(id_) or self.forest.called.get(id_)
        return self._relayed.get(id_) if node is None else node.completion

    def reward(self, completion: str, value: float) -> bool:
        """Give a completion its own reward, and return whether there is such a completion; an opponent's has no effect.

        Args:
            completion: Its id, also as a protocol writes it: `chatcmpl-…`, `msg_…`.
            value: The reward.
        """
        found = re.search(r"[0-9A-Za-z]*\Z", completion)
        node = self.forest.completions.get(found[0]) if found else None
        if node is not None:
            node.reward = value
        return node is not None or (found is not None and found[0] in self._relayed)

    def end(self) -> None:
        """Answer no further request, and cancel the generations under way."""
        self._over = True
        for task in self._tasks:
            task.cancel()

    def returned(self) -> None:
        """Note that the agent has returned or ended: nothing that reaches a client from now on counts.

        An answer that the agent has read is noted as delivered by then, although the task that writes it may run some
        steps of the event loop after the last byte has gone: the agent's return takes as many steps, and begins later.
        """
        self.has_returned = True
        self.end()

    async def closed(self) -> None:
        """Wait until no generation is under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the ledger's generations, in its order, and forget them in the engine."""
        return self._sampler.receipts()

    async def select(self) -> None:
        """Ask `proxy.select` which completions are trained, once the session is over.

        Raises:
            ConfigError: It failed.
        """
        delivered = self.forest.delivered
        if self._run.select is not None and delivered:
            self._selected = await selected(delivered, self._run.select)

    def outcome(self, reason: StopReason, error: str = "") -> Outcome:
        """Return the session's outcome, with sealed rows. Without `select` before, all completions are trained.

        Args:
            reason: Why it ended.
            error: The error.
        """
        run = self._run
        outcome = session_outcome(
            self.id,
            self.forest,
            reason,
            error or self.failed,
            prompt_length=run.limits.prompt_length,
            fill_id=run.fill_id,
            max_rows=run.max_rows,
            chosen=set(self.forest.delivered) if self._selected is None else self._selected,
            roles=run.roles,
        )
        outcome.generate_s = self._sampler.seconds
        outcome.cache = self._sampler.cache
        return outcome

    def forget(self) -> None:
        """Let go of all completions. The session takes no requests after it."""
        self.forest.clear()
        self.journal.clear()

    def keep(self, delivery: Delivery) -> None:
        """Keep the samples of a client that has gone."""
        for sample in delivery.samples:
            if (node := sample.node) is not None:
                self.forest.note(node, returned=False)
            if delivery.prompt is not None:
                delivery.prompt.left[_wish(delivery.request)].append(sample)
        delivery.samples = []

    def _start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiting request gets it, if there is one

    async def _answer(self, delivery: Delivery) -> None:
        """Find or sample the completions of a request."""
        request = delivery.request
        with during("request"), _noting(delivery.noted, request):
            role = None if self.roles is None else self.roles.named(request.model)
            with self._losing():
                opponent = await self.opponents.of(role)
            if opponent is not None:
                await self._relay(delivery, opponent)
                return
            prompt = delivery.prompt = delivery.noted.prompt = await self._prompt(request)
            self._check_room(prompt)
            if delivery.gone:
                return
            self.journal.samples(delivery.noted)
            kept = prompt.left[_wish(request)]
            while kept and len(delivery.samples) < request.n:
                sample = kept.popleft()
                if sample.usable:
                    delivery.samples.append(sample)
            missing = request.n - len(delivery.samples)
            try:
                self._count(missing)
            except RefusedError:
                kept.extend(delivery.samples)
                delivery.samples = []
                raise
            samples = delivery.samples = [
                *delivery.samples,
                *(_PendingCompletion(self._start(self._sampler.sample(prompt, request))) for _ in range(missing)),
            ]
            tasks = [sample.task for sample in samples]
            await asyncio.wait(tasks)
            if any(task.cancelled() for task in tasks):
                raise _over()
            lost = [task for task in tasks if isinstance(task.exception(), RefusedError)]
            if lost and self._run.outlives_engine:  # its repeat asks for no more than it got
                self._asked -= len(lost)
            nodes = [task.result() for task in tasks]
            if not delivery.gone:
                self.journal.answer(delivery.noted, nodes)
                for node in nodes:
                    self.forest.note(node, returned=True)
            delivery.completions = [self._shaped(node, request) for node in nodes]

    def _count(self, more: int) -> None:
        """Count completions that are about to be made, or refuse them."""
        limit = self._run.max_completions
        if limit is not None and self._asked + more > limit:
            raise _refused(
                "completions_used_up",
                f"this session has had {self._asked} of {limit} completions, and {more} more are asked for; end it",
            )
        self._asked += more

    def _require(self) -> None:
        """Refuse a request of a session that is over, or invalid."""
        if self._over:
            raise _over()
        if self.failed:
            raise engine_failed(self.failed)

    async def _relay(self, delivery: Delivery, opponent: RemoteModel) -> None:
        """Let an opponent answer a request. Its answer is in no row."""
        self._require()
        request = delivery.request
        self._count(request.n)
        # It has a time limit of its own. An opponent that hangs must not look like an agent that is late.
        with self._losing(), stopped(), during("wait", f"opponent {opponent.name}"):
            most = self._run.limits.turn_budget(0)
            made = await opponent.complete(request, self._sampling, most, self.id)
        for each in made:
            self._relayed |= dict.fromkeys((each.id, *(call.id for call in each.calls)), each)
        delivery.completions = made
        self.journal.relayed(delivery.noted, request, opponent.name, made)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Refuse a request, and make the session invalid, where an opponent is lost."""
        try:
            yield
        except OpponentLostError as error:
            self.failed, self.opponents.outage = self.failed or str(error), error.outage
            raise engine_failed(str(error)) from None

    async def _prompt(self, request: ChatRequest) -> PromptNode:
        """Return the prompt of a request, rendered."""
        self._require()
        role = None if self.roles is None else self.roles.named(request.model)
        tools = self._tools_key(request.tools)
        match = self.forest.match(request.messages, (role, tools))
        prompt = match.prompt
        if match.parent is not None:  # its client sent it back, so the client has it
            self._seen(match.parent)
        if prompt is None:
            prompt = PromptNode(match.parent, match.messages[match.new :], request.tools, role)
            self.forest.grow(prompt, request.messages, (role, tools), match)
            prompt.rendering = self._start(self._render(prompt, match.messages, tools))
        if prompt.rendering is not None and not prompt.rendering.done():
            await asyncio.wait({prompt.rendering})
        if prompt.rendering is not None:
            if prompt.rendering.cancelled():
                raise _over()
            prompt.rendering.result()
        return prompt

    async def _render(self, prompt: PromptNode, messages: Sequence[Message], tools: str) -> None:
        """Complete a new prompt. `messages` are all of the request's."""
        try:
            if (parent := prompt.parent) is not None:
                before, sampled = parent.prompt, parent.generation.ids
                try:
                    added = await self._run.renderer.following(parent.said, prompt.messages, sampled, before.shown)
                    prompt.follow(added.template, added.added)
                    prompt.shown, prompt.images = before.shown, [*before.images, *added.images]
                    return
                except RefusedError:  # some templates refuse the new messages alone, and render the whole
                    self.forest.uproot(prompt, messages)
            made = await self._run.renderer.prompt(messages, prompt.tools, tools)
            prompt.begin(made.ids)
            prompt.shown, prompt.images = made.shown, made.images
        except BaseException:  # a cancelled rendering leaves no prompt either
            self.forest.forget(prompt)
            raise

    def _seen(self, node: CompletionNode) -> None:
        if not node.delivered and not self.has_returned:
            self.forest.note(node, returned=True, delivered=True)

    def _tools_key(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the key of a list of tools: its JSON."""
        if tools is not self._tools[0]:  # most often it is the very list of the last request
            self._tools = (tools, _json(tools) if tools else "")
        return self._tools[1]

    def _check_room(self, prompt: PromptNode) -> None:
        """Refuse a prompt that leaves no room for a token."""
        limits, tokens, first = self._run.limits, prompt.length, prompt.root.length
        if first > limits.prompt_length:
            raise ContextLengthError(first, limits.prompt_length)
        if tokens - first >= limits.response_length:
            raise ContextLengthError(tokens, first + limits.response_length - 1)

    def _shaped(self, node: CompletionNode, request: ChatRequest) -> Completion:
        """Return a completion as a request wants it."""
        if not request.logprobs:
            return node.completion
        texts = self._run.reader.token_texts(node.generation.ids)
        return replace(node.completion, token_logprobs=list(zip(texts, node.generation.logprobs, strict=True)))


@contextmanager
def _noting(noted: JournalEntry, request: ChatRequest) -> Iterator[None]:
    """Note why a request is refused; its messages, too, where it became no prompt."""
    try:
        yield
    except RefusedError as refused:
        noted.refused = refused.code
        if noted.prompt is None and refused.code not in _OVER:
            noted.messages = request.messages
        raise
    except asyncio.CancelledError:
        noted.refused = _OVER[0]
        raise


def _json(tools: Sequence[dict[str, Any]]) -> str:
    try:
        return orjson.dumps(tools).decode()
    except TypeError:  # a number of more than 64 bits
        return json.dumps(tools)


def _wish(request: ChatRequest) -> tuple[Any, ...]:
    """Return a request's options beside its messages and tools."""
    return (request.max_tokens, tuple(request.stop), request.reads_calls)


def _refused(code: str, message: str) -> RefusedError:
    return RefusedError(400, code, message)


def _over() -> RefusedError:
    return _refused(_OVER[0], "this session is over; send no further request")
