"""`Forest`: the completions of a session, and which of them a request continues.

    root prompt ── completion 0 ── prompt (a tool's answer) ── completion 1
               │                └─ prompt (another answer)  ── completion 3
               └── completion 2                     (the same request again)

A prompt is what the engine is given, a completion is what it sampled. Beside them stands a tree of messages as clients
write them, in which a request is looked up message by message. One message may lead to several points: clients leave
out ids, so that two completions with equal texts look the same. The deepest completion wins, and of equally deep ones
the one that was delivered last.

A request costs a look at its new messages only: what it shares with an earlier request is found by one comparison.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.canonical import Compared, compared
from verl_multiturn.proxy.requests import Completion
from verl_multiturn.rollout.engine import Generation

# How many requests are remembered whole. A session with more branches at once looks at each message again.
_MOST_HISTORIES = 8


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """A request id of the engine, under which it generates one completion at a time."""

    name: str
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
    """Samples whose clients have gone, by what else was asked for."""
    point: _Point | None = None
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
        while prompt.parent is not None and prompt.point is not None:  # without a point it keeps the whole request
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
    completion: Completion
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
    point: _Point | None = None

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
class Entry:
    """A generation that the engine returned. Its receipt is number `index` of its lane."""

    lane: Lane
    index: int
    parent: CompletionNode | None
    node: CompletionNode | None = None
    """The completion; None if it did not become one."""
    cause: str = "invalid"
    """Why it is in no row, if it did not become one."""


@dataclass(eq=False, repr=False, slots=True)
class _Point:
    """A point between two messages."""

    depth: int
    """How many messages are before it."""
    above: CompletionNode | None
    """The last completion among them."""
    steps: dict[Hashable, list[tuple[Compared, _Point]]] = field(default_factory=dict)
    """The messages that may follow, by their key."""
    prompt: PromptNode | None = None


@dataclass(eq=False, repr=False, frozen=True, slots=True)
class _History:
    """The messages of an earlier request, and the points to which they lead."""

    tools: str
    messages: list[Message]
    points: list[_Point]


@dataclass(eq=False, repr=False, frozen=True, slots=True)
class Match:
    """A finding about a request's messages."""

    prompt: PromptNode | None
    """The prompt that they are; None if there is none yet."""
    parent: CompletionNode | None
    """The completion that they continue."""
    new: int
    """Index of the first message after the parent's turn; 0 without a parent."""
    reached: _Point
    """The point behind the parent's turn; without a parent, one to which they lead as far as they are known."""
    history: _History | None


class Forest:
    """The completions of a session."""

    def __init__(self) -> None:
        self.roots: list[PromptNode] = []
        self.ledger: list[Entry] = []
        """All generations, in the order in which the engine returned them."""
        self.completions: dict[str, CompletionNode] = {}
        """Completions by their id, in the same order."""
        self._starts: dict[str, _Point] = {}
        self._histories: list[_History] = []
        self._returned = 0

    @property
    def delivered(self) -> list[CompletionNode]:
        """Return the completions that a client has, in the order of their numbers."""
        return sorted((node for node in self.completions.values() if node.delivered), key=lambda node: node.number)

    def match(self, messages: Sequence[Message], tools: str) -> Match:
        """Find the prompt that a request's messages are, or the completion that they continue.

        They continue a completion if they begin with the messages of its prompt and with its turn, and if only tools,
        users and the system speak after it.

        Args:
            messages: All messages of the request.
            tools: What stands for the request's tools. Requests with other tools have nothing in common.
        """
        history = self._history(messages, tools)
        if history is None:
            points, known = [self._starts.setdefault(tools, _Point(0, None))], 0
        else:
            points, known = history.points, len(history.messages)
        reached, best = points[0], _best(point.above for point in points)
        for message in messages[known:]:
            one = compared(message)
            points = [to for point in points for other, to in point.steps.get(one.key, ()) if one.fits(other)]
            if not points:
                break
            reached, best = points[0], _best([best, *(point.above for point in points)])
        if asked := [point for point in points if point.prompt is not None]:
            found = max(asked, key=lambda point: _rank(point.above))
            self._remember(messages, tools, points, history)
            return Match(found.prompt, found.above, 0, found, history)
        if best is not None and best.point is not None:
            added = messages[best.point.depth :]
            if added and all(message["role"] != "assistant" for message in added):
                return Match(None, best, best.point.depth, best.point, history)
        return Match(None, None, 0, reached, history)

    def grow(self, prompt: PromptNode, messages: Sequence[Message], tools: str, match: Match) -> None:
        """Put a new prompt where `match` found none.

        Args:
            prompt: The prompt, with the parent that was found.
            messages: All messages of the request.
            tools: As for `match`.
            match: What was found.
        """
        self.attach(prompt)
        point = match.reached
        for message in messages[point.depth :]:
            one = compared(message)
            steps = point.steps.setdefault(one.key, [])
            # A turn of the model's leads to a point with another completion above.
            following = next((to for other, to in steps if other == one and to.above is point.above), None)
            if following is None:
                following = _Point(point.depth + 1, point.above)
                steps.append((one, following))
            point = following
        point.prompt, prompt.point = prompt, point
        self._remember(messages, tools, [point], match.history)

    def kept(self, messages: Sequence[Message], tools: str) -> Sequence[Message]:
        """Return the messages of a request, with those of an earlier one in the place of equal ones."""
        self._remember(messages, tools, [], self._history(messages, tools))
        return self._histories[-1].messages if messages else messages

    def attach(self, prompt: PromptNode) -> None:
        """Put a prompt after its parent, or among the roots."""
        (self.roots if prompt.parent is None else prompt.parent.prompts).append(prompt)

    def uproot(self, prompt: PromptNode, messages: Sequence[Message]) -> None:
        """Make a root of a prompt that cannot be appended to its parent.

        Args:
            prompt: The prompt.
            messages: All messages of its request.
        """
        if prompt.parent is not None:
            prompt.parent.prompts.remove(prompt)
        prompt.parent, prompt._root, prompt.messages = None, None, messages
        self.roots.append(prompt)

    def forget(self, prompt: PromptNode) -> None:
        """Take out a prompt that could not be rendered."""
        (self.roots if prompt.parent is None else prompt.parent.prompts).remove(prompt)
        if prompt.point is not None:
            prompt.point.prompt = None

    def clear(self) -> None:
        """Let go of all prompts and completions.

        They refer to each other, so that else only the garbage collector would free them, which stops the event loop.
        """
        prompts = self.roots
        while prompts:
            following: list[PromptNode] = []
            for prompt in prompts:
                for node in prompt.completions:
                    following += node.prompts
                    node.prompts, node.point = [], None
                prompt.completions, prompt.point, prompt.rendering = [], None, None
                prompt.left.clear()
            prompts = following
        for held in (self.roots, self.ledger, self.completions, self._starts, self._histories):
            held.clear()

    def match_ids(self, ids: Sequence[int]) -> tuple[PromptNode | None, CompletionNode | None]:
        """Find the prompt that is exactly `ids`, or the deepest completion with whose ids they begin."""
        best: CompletionNode | None = None
        prompts = self.roots
        while prompts:
            begun: list[CompletionNode] = []
            for prompt in prompts:
                length = prompt.length
                own = prompt.ids if prompt.parent is None else [*prompt.template, *prompt.added]
                if not length or ids[length - len(own) : length] != own:
                    continue
                if length == len(ids):
                    return prompt, prompt.parent
                begun += [node for node in prompt.completions if ids[length : node.tokens] == node.generation.ids]
            best = _best([best, *begun], key=_reach)
            prompts = [prompt for node in begun for prompt in node.prompts]
        return None, best

    def add(self, node: CompletionNode, echoes: Iterable[Message]) -> None:
        """Put a completion after its prompt.

        Args:
            node: The completion.
            echoes: The messages as which a client may send it back.
        """
        self.completions[node.completion.id] = node
        node.prompt.completions.append(node)
        if (point := node.prompt.point) is not None:
            node.point = _Point(point.depth + 1, node)
            for echo in echoes:
                one = compared(echo)
                point.steps.setdefault(one.key, []).append((one, node.point))

    def note(self, node: CompletionNode, *, returned: bool, delivered: bool = False) -> None:
        """Note that a completion goes to a client, that the client has it, or that it has gone without it.

        Args:
            node: The completion.
            returned: Whether a client waits for it, or has it.
            delivered: Whether the client has it.
        """
        self._returned += 1
        node.delivered |= delivered
        node.returned = self._returned if returned or node.delivered else 0

    def _history(self, messages: Sequence[Message], tools: str) -> _History | None:
        """Return the longest earlier request with which the messages begin; None without one."""
        found: _History | None = None
        for each in self._histories:
            known = len(each.messages)
            if each.tools != tools or known > len(messages) or (found and known <= len(found.messages)):
                continue
            # The last message tells most branches apart, at the least cost.
            if each.messages[-1] == messages[known - 1] and each.messages == messages[:known]:
                found = each
        return found

    def _remember(
        self, messages: Sequence[Message], tools: str, points: list[_Point], longer_than: _History | None
    ) -> None:
        """Remember a request in the place of the one that it continues."""
        if not messages:
            return
        if longer_than is None:
            known = list(messages)
        else:
            known = [*longer_than.messages, *messages[len(longer_than.messages) :]]
            self._histories.remove(longer_than)
        self._histories = [*self._histories[1 - _MOST_HISTORIES :], _History(tools, known, points)]


def _rank(node: CompletionNode | None) -> tuple[int, int, int]:
    """Return how well a completion fits messages that begin with it: by depth, then by the order of deliveries."""
    if node is None or node.point is None:
        return (0, 0, 0)
    return (node.point.depth, node.returned, node.number)


def _reach(node: CompletionNode | None) -> tuple[int, int, int]:
    """Return the same for ids."""
    return (0, 0, 0) if node is None else (node.tokens, node.returned, node.number)


def _best(nodes: Iterable[CompletionNode | None], key: Any = _rank) -> CompletionNode | None:
    return max(nodes, key=key, default=None)
