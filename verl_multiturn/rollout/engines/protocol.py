"""The engine protocol: token ids in; sampled ids with log-probabilities and weight versions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Generation:
    """The tokens that an engine sampled for one assistant turn. The three lists are aligned."""

    ids: list[int]
    """Sampled token ids, `(tokens,)`."""
    logprobs: list[float]
    """Log-probability of each sampled token, `(tokens,)`."""
    versions: list[int]
    """Training step of the weights that sampled each token, `(tokens,)`; -1 where the engine does not know it."""
    finish: Finish
    """Reason of the end. `stop`: an end token or a stop text; `length`: the budget; `abort`: the turn was cut off.
    """
    cached: int | None = None
    """How many of the given ids the engine had in its prefix cache; None if it does not report them."""
    held_s: float = 0.0
    """Seconds for which the turn waited for room in the engine's cache."""
    led_s: float = 0.0
    """Seconds for which it waited for one that begins alike, whose ids the engine need not read again."""
    cache_use: float | None = None
    """Tokens of all conversations at that engine, as a share of its cache; None if it does not report it."""


def cut(generation: Generation, end: int, finish: Finish) -> Generation:
    """Return the first `end` tokens of a generation, with another reason of the end."""
    return replace(
        generation,
        ids=generation.ids[:end],
        logprobs=generation.logprobs[:end],
        versions=generation.versions[:end],
        finish=finish,
    )


@dataclass(frozen=True)
class Ask:
    """A question to an engine: go on with these ids."""

    request_id: str
    """Name of the request."""
    ids: Sequence[int]
    """All token ids of the conversation so far, `(tokens,)`."""
    sampling: Mapping[str, Any]
    """Sampling parameters, under the engine's own names."""
    max_new_tokens: int
    """The most tokens that may be sampled."""
    images: Sequence[Any] = ()
    """PIL images, one for each group of image placeholders in `ids`."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The same conversation in words, for an engine that takes no ids; empty if the caller has none. It grows
    after the answer."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that may be called."""
    role: str | None = None
    """Name of the role that speaks, one of `proxy.roles` or of `train`; None where there are none."""


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences have in common from their beginning."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # the first `low` are the same, the first `high` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass
class CacheUse:
    """Prompt tokens that an engine had in its prefix cache, summed over the generations that report them."""

    given: int = 0
    """Token ids that the engine was given."""
    cached: int = 0
    """Of these, the ids that it did not have to read again."""
    new: int = 0
    """Of the given ids, those that were not given or sampled before in the conversation, without its first prompts."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Number of ids of each first prompt, by a hash of them: siblings have the same."""
    held_s: float = 0.0
    """Seconds for which turns waited for room."""
    led_s: float = 0.0
    """Seconds for which turns waited for those that lead them."""
    use: float | None = None
    """Largest share of an engine's cache that all conversations there needed; None if no engine reports it."""

    def add(self, ask: Ask, generation: Generation, known: int) -> None:
        """Add a generation, if the engine reports its cached tokens.

        Args:
            ask: The request.
            generation: The answer.
            known: How many of the ids it was given or has sampled before; 0: it is a first prompt. The engine has yet
                to read the last id that it sampled just before.
        """
        self.held_s += generation.held_s
        self.led_s += generation.led_s
        if generation.cache_use is not None:
            self.use = max(self.use or 0.0, generation.cache_use)
        if generation.cached is None:
            return
        self.given += len(ask.ids)
        self.cached += generation.cached
        if known:
            self.new += max(1, len(ask.ids) - known)
        else:
            self.prompts[hash(tuple(ask.ids))] = len(ask.ids)


class Engine(Protocol):
    """An object that continues a list of token ids."""

    async def generate(self, ask: Ask) -> Generation:
        """Sample at most `ask.max_new_tokens` tokens after `ask.ids`.

        When the task of a generation is cancelled, the engine stops sampling for this request. It returns the tokens
        sampled so far, and raises CancelledError only if there are none. In no case may it end while a server still
        samples: a server must not be put to sleep meanwhile. An engine that cannot stop a single generation goes on to
        its end, which the token budget bounds.

        Time in which an engine pauses, for example while it gets new weights, does not count for the request's
        time limit: wait within `rollout.life.stopped`.

        Raises:
            EngineError: The engine cannot return a generation.
        """
        ...
