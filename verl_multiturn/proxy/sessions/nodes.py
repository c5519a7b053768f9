"""The nodes of a session's forest, prompts and completions, and those of the trie of the requests' messages."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.proxy.protocols.requests import Completion
from verl_multiturn.proxy.sessions.canonical import CanonicalMessage
from verl_multiturn.rollout.engines.protocol import Generation


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """A request id of the engine, under which it generates one completion at a time."""

    name: str
    number: int = 0
    busy: bool = False
    generations: int = 0
    """Generations that the engine returned; each has a receipt."""


@dataclass(eq=False, repr=False, slots=True)
class PromptNode:
    """A prompt for the engine: a root's rendered messages, or those that follow a completion."""

    parent: CompletionNode | None
    """The completion that it continues; None for a root."""
    messages: Sequence[Message]
    """The request's messages; those after the parent's turn, if there is one."""
    tools: Sequence[dict[str, Any]] = ()
    role: str | None = None
    """The role that its completions speak for; its parent has the same."""
    shown: Sequence[dict[str, Any]] = ()
    """The tools' schemas as the model is shown them."""
    template: list[int] = field(default_factory=list)
    """Ids of the template between the parent's turn and the new messages; empty for a root."""
    added: list[int] = field(default_factory=list)
    """Ids of the new messages; empty for a root."""
    length: int = 0
    """Number of all ids that the engine is given; 0 until they are there."""
    images: list[Any] = field(default_factory=list)
    """All images, in the order of their placeholders in `ids`."""
    _root: PromptNode | None = field(init=False)
    """The prompt with which the row begins; None for that itself, which would else refer to itself."""
    lane: Lane | None = None
    """Where a root's first completion is sampled."""
    completions: list[CompletionNode] = field(default_factory=list)
    rendering: asyncio.Future[None] | None = None
    """Done when the ids are there."""
    left: dict[Hashable, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    """Samples whose clients have gone, by the rest of the request."""
    trie_node: TrieNode | None = None
    _ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._root = None if self.parent is None else self.parent.prompt.root

    @property
    def root(self) -> PromptNode:
        """Return the prompt with which the row begins."""
        return self if self._root is None else self._root

    @property
    def ids(self) -> list[int]:
        """Return all ids that the engine is given. The list must not be changed."""
        parts: list[list[int]] = []
        prompt = self
        while prompt._ids is None and prompt.parent is not None:
            parts += [prompt.added, prompt.template, prompt.parent.generation.ids]
            prompt = prompt.parent.prompt
        if prompt is self:
            return self._ids or []
        return list(chain(prompt._ids or (), *reversed(parts)))

    def begin(self, ids: list[int]) -> None:
        """Give a root its ids."""
        self._ids, self.length = ids, len(ids)

    def follow(self, template: list[int], added: list[int]) -> None:
        """Give a continuation the ids that follow its parent's turn."""
        assert self.parent is not None
        before = self.parent.prompt
        self.template, self.added = template, added
        self._ids = [*before.ids, *self.parent.generation.ids, *template, *added]
        self.length = len(self._ids)
        if before.parent is not None:  # its ids can be put together again; else a session's memory grew by the square
            before._ids = None

    @property
    def conversation(self) -> list[Message]:
        """Return all messages of the request."""
        parts: list[Sequence[Message]] = [self.messages]
        prompt = self
        while prompt.parent is not None:
            said, prompt = prompt.parent.said, prompt.parent.prompt
            parts += [[said], prompt.messages]
        return [message for part in reversed(parts) for message in part]


@dataclass(eq=False, repr=False, slots=True)
class CompletionNode:
    """A generation that became a completion."""

    number: int
    """Number of the generation in its session, from 0."""
    prompt: PromptNode
    generation: Generation
    lane: Lane
    turn: AssistantTurn
    """Its turn, with the ids that its calls have in the session."""
    completion: Completion
    """The turn as it goes to clients."""
    said: Message
    """The turn as a message of the template."""
    delivered: bool = False
    """Whether a client has it."""
    returned: int = 0
    """Place in the order in which completions went to clients; 0 where none has it or waits for it."""
    reward: float | None = None
    """The reward that the agent gave to this completion alone."""
    prompts: list[PromptNode] = field(default_factory=list)
    """The prompts that continue it."""
    trie_node: TrieNode | None = None

    @property
    def parent(self) -> CompletionNode | None:
        """Return the completion that this one continues; None where it begins anew."""
        return self.prompt.parent

    @property
    def path(self) -> list[CompletionNode]:
        """Return the completions from the root to this one."""
        path: list[CompletionNode] = []
        node: CompletionNode | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def tokens(self) -> int:
        """Return the number of ids up to and with the sampled ones."""
        return self.prompt.length + len(self.generation.ids)


@dataclass(eq=False, repr=False, slots=True)
class SampledGeneration:
    """A generation that the engine returned. Its receipt is number `index` of its lane."""

    lane: Lane
    index: int
    parent: CompletionNode | None
    node: CompletionNode | None = None
    """The completion; None if it did not become one."""
    cause: str = "invalid"
    """Why it is in no row, if it did not become one."""
    given: Sequence[Message] = ()
    """The messages of its prompt that follow its parent's."""
    role: str | None = None
    """The role that it speaks for."""
    at: float = field(default_factory=time.time)
    """Time (`time.time`) at which the engine had answered."""
    seconds: float = 0.0
    """Seconds for which the engine was waited for."""
    finish: str = ""
    """Why it ended, in the engine's word."""
    cached: int | None = None
    """Tokens of the prompt that the engine had in its prefix cache; None where it is not reported."""


@dataclass(eq=False, repr=False, slots=True)
class TrieNode:
    """The messages from the first of a request to this node."""

    depth: int
    """How many they are."""
    above: CompletionNode | None
    """The last completion among them."""
    steps: dict[Hashable, list[tuple[CanonicalMessage, TrieNode]]] = field(default_factory=dict)
    """The messages that may follow, by their key."""
    prompt: PromptNode | None = None
