"""`Prompt`: a prompt as blocks of tokens, so that common parts of several are found, and count once.

A block's key covers the block and all that comes before it, as a cache keeps them. So two prompts are alike as far
as their keys are, and the known blocks of a prompt come before its unknown ones: a few look-ups find their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence
from weakref import WeakValueDictionary

BLOCK = 16
"""Tokens of a block that is counted. Prompts that differ inside of a block have none of it in common."""


def keys(ids: Sequence[int], size: int) -> list[int]:
    """Return a key of each block of a prompt, which covers the block and all before it.

    Args:
        ids: The prompt's tokens.
        size: Tokens of a block; the last one may have fewer.
    """
    found: list[int] = []
    for start in range(0, len(ids), size):
        found.append(hash((found[-1] if found else 0, *ids[start : start + size])))
    return found


class Prompt:
    """A prompt, of which the keys of its blocks are kept.

    Args:
        ids: Its tokens.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.tokens = len(ids)
        self.keys = keys(ids, BLOCK)

    def known(self, blocks: Container[int]) -> int:
        """Return how many of its blocks are there; of other prompts there have to be all blocks, or none."""
        if self.keys and self.keys[-1] in blocks:  # as of every sibling's but the first
            return len(self.keys)
        return bisect_left(self.keys, True, key=lambda key: key not in blocks)

    def beyond(self, known: int) -> int:
        """Return how many tokens come behind its first `known` blocks."""
        return max(0, self.tokens - known * BLOCK)


class Blocks:
    """The blocks of prompts that lie in a cache: each counts once, until the last prompt that has it is removed."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        """How many different prompts have each block."""
        self._times: Counter[Prompt] = Counter()
        """How often each prompt is there."""
        self._same: WeakValueDictionary[int, Prompt] = WeakValueDictionary()
        """Each prompt that somebody has, by its hash."""

    def __contains__(self, key: object) -> bool:
        return key in self._users

    def __len__(self) -> int:
        return len(self._users)

    def prompt(self, ids: Sequence[int]) -> Prompt:
        """Return the prompt of these tokens: siblings have one, so that its blocks are looked at once a group."""
        key = hash(tuple(ids))
        found = self._same.get(key)
        if found is None:
            found = self._same[key] = Prompt(ids)
        return found

    def add(self, prompt: Prompt) -> int:
        """Add a prompt, and return how many tokens it has that no other one has."""
        self._times[prompt] += 1
        if self._times[prompt] > 1:
            return 0
        more = prompt.beyond(prompt.known(self))
        for key in prompt.keys:
            self._users[key] = self._users.get(key, 0) + 1
        return more

    def remove(self, prompt: Prompt) -> int:
        """Remove a prompt that was added, and return how many tokens go with it."""
        self._times[prompt] -= 1
        if self._times[prompt]:
            return 0
        del self._times[prompt]
        for key in prompt.keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
        return prompt.beyond(prompt.known(self))
