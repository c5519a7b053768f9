"""`Forest`: the completions of a session, and where a new request belongs among them.

`AgentSession` looks each request up in it (`match`); `Sampler` adds the engine's completions. At the session's end
`rows.py` reads the rows of the batch off it: a row is a path from a root to a leaf.

    root prompt ── completion 0 ── prompt (a tool's answer) ── completion 1
               │                └─ prompt (another answer)  ── completion 3
               └── completion 2                     (the same request again)

A *prompt* is the engine's input, a *completion* is its sample. A request continues a completion when its messages begin
with those of the completion's prompt and its turn. Only the messages after that are rendered, so that sampled tokens
are never written a second time. A request that continues none begins a root. So does a request of another role
(`proxy.roles`) than that of the completion, whose text is context then: a path of the forest is of one role.

Requests are looked up message by message, in a tree of messages as clients write them. Clients leave out ids, so two
completions with equal texts look the same, and one message may lead to several places in the tree. The deepest
completion wins; among equally deep ones, the one that was delivered last. A client that has given the calls other ids
is understood: its request is read with the session's ids (`renaming.py`). An answer without an id is for the first call
that no other answer names (`open_calls.py`).

Invariants:
- a request costs a look at its new messages only: the part shared with an earlier request is found by one comparison;
- the ledger lists every generation that the engine returned, in that order, whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.sessions.canonical import compared
from verl_multiturn.proxy.sessions.nodes import CompletionNode, PromptNode, SampledGeneration, TrieNode
from verl_multiturn.proxy.sessions.open_calls import NamedCall, answered_calls, are_final, with_ids
from verl_multiturn.proxy.sessions.renaming import AS_WRITTEN, Renaming

# How many requests are remembered whole. A session with more branches at once looks at each message again.
_MOST_HISTORIES = 8


class _Place(NamedTuple):
    """A node to which messages lead, and the meaning of their ids on the way to it."""

    node: TrieNode
    renaming: Renaming = AS_WRITTEN


@dataclass(eq=False, repr=False, frozen=True, slots=True)
class _KnownHistory:
    """The messages of an earlier request, and the places to which they lead."""

    branch: Hashable
    messages: list[Message]
    places: list[_Place]


@dataclass(eq=False, repr=False, frozen=True, slots=True)
class Match:
    """A finding about a request's messages."""

    prompt: PromptNode | None
    """The prompt that they are; None if there is none yet."""
    parent: CompletionNode | None
    """The completion that they continue."""
    new: int
    """Index of the first message after the parent's turn; 0 without a parent."""
    reached: TrieNode
    """The node behind the parent's turn; without a parent, one to which they lead as far as they are known."""
    messages: Sequence[Message]
    """All of them, with the ids that the session gave."""
    renaming: Renaming
    history: _KnownHistory | None


class Forest:
    """The completions of a session."""

    def __init__(self) -> None:
        self.roots: list[PromptNode] = []
        self.ledger: list[SampledGeneration] = []
        """All generations, in the order in which the engine returned them."""
        self.completions: dict[str, CompletionNode] = {}
        """Completions by their id, in the same order."""
        self.called: dict[str, CompletionNode] = {}
        """Completions by the ids of their calls."""
        self._starts: dict[Hashable, TrieNode] = {}
        self._histories: list[_KnownHistory] = []
        self._returned = 0

    @property
    def delivered(self) -> list[CompletionNode]:
        """Return the completions that a client has, in the order of their numbers."""
        return sorted((node for node in self.completions.values() if node.delivered), key=lambda node: node.number)

    def match(self, messages: Sequence[Message], branch: Hashable, renamed: bool = True) -> Match:
        """Find the prompt that a request's messages are, or the completion that they continue.

        They continue a completion if they begin with the messages of its prompt and with its turn, and if only tools,
        users and the system speak after it.

        Args:
            messages: All messages of the request.
            branch: The request's role, and the key of its tools. Requests with others have nothing in common, so that
                a path of the forest is of one role.
            renamed: Whether the calls may have other ids than the session gave.
        """
        history = self._history(messages, branch)
        if history is None or not renamed:
            places, known = [_Place(self._starts.setdefault(branch, TrieNode(0, None)))], 0
        else:
            places, known = history.places, len(history.messages)
        given = self.called if renamed else {}
        reached = places[0]
        best = max(places, key=_place_rank)
        for index, answers in enumerate(answered_calls(messages, known), known):
            message = messages[index]
            one = compared(message, answers)
            before = islice(messages, index)
            places = [
                _Place(to, renaming)
                for node, earlier in places
                for other, to in node.steps.get(one.key, ())
                if one.fits(other) and (renaming := earlier.reads(message, one, other, given, before)) is not None
            ]
            if not places:
                break
            reached, best = places[0], max([best, *places], key=_place_rank)
        if asked := [place for place in places if place.node.prompt is not None]:
            found = max(asked, key=_place_rank)
            node = found.node
            self._remember(messages, branch, places, history)
            return Match(node.prompt, node.above, 0, node, messages, found.renaming, history)
        parent = best.node.above
        new = 0 if parent is None or parent.trie_node is None else parent.trie_node.depth
        if new == 0 or new == len(messages) or any(message["role"] == "assistant" for message in messages[new:]):
            parent, new, best = None, 0, reached
        renaming = best.renaming.through(messages[best.node.depth :])
        if renaming is None:  # an answer has the id of another call
            return self.match(messages, branch, renamed=False)
        node = best.node if parent is None or parent.trie_node is None else parent.trie_node
        named = with_ids(renaming.applied(messages), new, _calls_of(parent))
        return Match(None, parent, new, node, named, renaming, history)

    def grow(self, prompt: PromptNode, messages: Sequence[Message], branch: Hashable, match: Match) -> None:
        """Put a new prompt where `match` found none.

        Args:
            prompt: The prompt, with the parent that was found.
            messages: All messages of the request, as it has them.
            branch: As for `match`.
            match: The match found.
        """
        (self.roots if prompt.parent is None else prompt.parent.prompts).append(prompt)
        reached = match.reached
        answered = answered_calls(match.messages, reached.depth, match.new, _calls_of(match.parent))
        for message, answers in zip(match.messages[reached.depth :], answered, strict=True):
            one = compared(message, answers)
            steps = reached.steps.setdefault(one.key, [])
            # A turn of the model's leads to a node with another completion above.
            following = next((to for other, to in steps if other == one and to.above is reached.above), None)
            if following is None:
                following = TrieNode(reached.depth + 1, reached.above)
                steps.append((one, following))
            reached = following
        reached.prompt, prompt.trie_node = prompt, reached
        self._remember(messages, branch, [_Place(reached, match.renaming)], match.history)

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
        if prompt.trie_node is not None:
            prompt.trie_node.prompt = None

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
                    node.prompts, node.trie_node = [], None
                prompt.completions, prompt.trie_node, prompt.rendering = [], None, None
                prompt.left.clear()
            prompts = following
        for held in (self.roots, self.ledger, self.completions, self.called, self._starts, self._histories):
            held.clear()

    def add(self, node: CompletionNode, echoes: Iterable[Message]) -> None:
        """Put a completion after its prompt.

        Args:
            node: The completion.
            echoes: The messages as which a client may send it back.
        """
        self.completions[node.completion.id] = node
        self.called |= dict.fromkeys((call.id for call in node.completion.calls), node)
        node.prompt.completions.append(node)
        if (reached := node.prompt.trie_node) is not None:
            node.trie_node = TrieNode(reached.depth + 1, node)
            for echo in echoes:
                one = compared(echo)
                reached.steps.setdefault(one.key, []).append((one, node.trie_node))

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

    def _history(self, messages: Sequence[Message], branch: Hashable) -> _KnownHistory | None:
        """Return the longest earlier request with which the messages begin; None without one."""
        found: _KnownHistory | None = None
        for each in self._histories:
            known = len(each.messages)
            if each.branch != branch or known > len(messages) or (found and known <= len(found.messages)):
                continue
            if not are_final(messages, known):
                continue
            # The last message distinguishes most branches, at the least cost.
            if each.messages[-1] == messages[known - 1] and each.messages == messages[:known]:
                found = each
        return found

    def _remember(
        self, messages: Sequence[Message], branch: Hashable, places: list[_Place], longer_than: _KnownHistory | None
    ) -> None:
        """Remember a request in the place of the one that it continues."""
        if not messages:
            return
        if longer_than is None:
            known = list(messages)
        else:
            known = [*longer_than.messages, *messages[len(longer_than.messages) :]]
            self._histories.remove(longer_than)
        self._histories = [*self._histories[1 - _MOST_HISTORIES :], _KnownHistory(branch, known, places)]


def _rank(node: CompletionNode | None) -> tuple[int, int, int]:
    """Return how well a completion fits messages that begin with it: by depth, then by the order of deliveries."""
    if node is None or node.trie_node is None:
        return (0, 0, 0)
    return (node.trie_node.depth, node.returned, node.number)


def _calls_of(node: CompletionNode | None) -> list[NamedCall]:
    """Return a completion's calls, with the ids that the session gave them."""
    return [] if node is None else [NamedCall(call.id, call.name) for call in node.completion.calls]


def _place_rank(place: _Place) -> tuple[int, int, int]:
    return _rank(place.node.above)
