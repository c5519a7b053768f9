"""`Journal`: the requests of a session, in the order in which they came, for its record.

A request is noted by the prompt that it became, whose messages the forest holds in any case. So a note costs nothing
that grows with the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.protocols.requests import ChatRequest
from verl_multiturn.proxy.sessions.nodes import CompletionNode, PromptNode
from verl_multiturn.rollout.outcome import SessionRequest

COUNT = "count_tokens"
"""Protocol of a request that asks for no completion."""
_MOST = 10_000
"""So many requests of a session are noted; an agent that goes on asking must not fill the memory."""


@dataclass(eq=False)
class JournalEntry:
    """A request, as far as it got."""

    at: float
    protocol: str
    role: str | None = None
    """Name of the model in it, where that has to be a role."""
    tools: Sequence[dict[str, Any]] = ()
    wishes: dict[str, Any] = field(default_factory=dict)
    prompt: PromptNode | None = None
    """The prompt that it became; None where it was refused before."""
    messages: Sequence[Message] = ()
    """Its messages, where there is no prompt."""
    number: int = 0
    """Its place among the session's requests."""
    answers: list[CompletionNode] = field(default_factory=list)
    delivered: bool = False
    order: int | None = None
    refused: str | None = None


class Journal:
    """The requests of one session.

    Args:
        generations: Returns how many generations the session has.
        has_roles: Whether requests name roles.
    """

    def __init__(self, generations: Callable[[], int] = int, has_roles: bool = False) -> None:
        self._noted: list[JournalEntry] = []
        self._answered = 0
        self._generations = generations
        self._has_roles = has_roles
        self.events: list[tuple[str, int, int]] = []
        """The events in their order, as in `schema.Session.events`."""

    def begin(self, request: ChatRequest, protocol: str) -> JournalEntry:
        """Note a request that came."""
        role = request.model if self._has_roles else None
        noted = JournalEntry(time.time(), protocol, role, request.tools, _wishes(request), number=len(self._noted))
        if len(self._noted) < _MOST:
            self._noted.append(noted)
        self._happened("request", noted)
        return noted

    def samples(self, noted: JournalEntry) -> None:
        """Note that a request, whose prompt is there, takes or begins its samples."""
        self._happened("samples", noted)

    def told(self, noted: JournalEntry, got: bool) -> None:
        """Note whether a request's client got its answer, or had gone before."""
        noted.delivered |= got
        self._happened("delivered" if got else "left", noted)

    def _happened(self, what: str, noted: JournalEntry) -> None:
        if noted.number < _MOST:
            self.events.append((what, noted.number, self._generations()))

    def refuse(self, protocol: str, code: str) -> None:
        """Note a request that could not be read."""
        if len(self._noted) < _MOST:
            self._noted.append(JournalEntry(time.time(), protocol, refused=code))

    def answer(self, noted: JournalEntry, nodes: Sequence[CompletionNode]) -> None:
        """Note that the completions go to the request's client."""
        noted.answers, noted.order = list(nodes), self._answered
        self._answered += 1

    def clear(self) -> None:
        """Let go of all requests, which refer to released parts of the forest."""
        self._noted.clear()

    def requests(self) -> list[SessionRequest]:
        """Return the requests; call it before the forest lets go of its prompts."""
        lengths: dict[int, int] = {}
        return [_request(noted, lengths) for noted in self._noted]


def _wishes(request: ChatRequest) -> dict[str, Any]:
    wishes = {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "logprobs": request.logprobs,
        "tool_choice": None if request.reads_calls else "none",
    }
    return {name: wish for name, wish in wishes.items() if wish not in (None, False, []) and (name, wish) != ("n", 1)}


def _request(noted: JournalEntry, lengths: dict[int, int]) -> SessionRequest:
    prompt = noted.prompt
    parent = None if prompt is None else prompt.parent
    return SessionRequest(
        at=noted.at,
        protocol=noted.protocol,
        role=noted.role,
        parent=None if parent is None else parent.number,
        shared=0 if prompt is None else _shared(prompt, lengths),
        messages=noted.messages if prompt is None else prompt.messages,
        tools=noted.tools,
        wishes=noted.wishes,
        generations=[node.number for node in noted.answers],
        delivered=noted.delivered,
        order=noted.order,
        refused=noted.refused,
    )


def _shared(prompt: PromptNode, lengths: dict[int, int]) -> int:
    """Return how many messages of a prompt's request come before those that it holds itself.

    Args:
        prompt: The prompt.
        lengths: Known lengths of other prompts, by their id; it grows.
    """
    path: list[PromptNode] = []
    at: PromptNode | None = prompt
    while at is not None and id(at) not in lengths:
        path.append(at)
        at = at.parent.prompt if at.parent is not None and at.trie_node is not None else None
    for each in reversed(path):
        above = each.parent.prompt if each.parent is not None and each.trie_node is not None else None
        lengths[id(each)] = 0 if above is None else lengths[id(above)] + len(above.messages) + 1
    return lengths[id(prompt)]
