"""`figures_of`: the numbers of some rows of an evaluation: how often right, how sure, and the effort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.estimates import Estimate, estimate, is_share, pass_at_k
from verl_multiturn.evaluation.results import EvaluatedRow, EvaluatedSample, Results

_MILLION = 1e6


class Price(NamedTuple):
    """The price of tokens of a model behind an endpoint, in any currency."""

    prompt: float
    """A million tokens that it is given; those that a later turn gives again count again."""
    sampled: float
    """A million tokens that it samples."""

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read a price such as `0.5,1.5`.

        Raises:
            ConfigError: It is none.
        """
        try:
            prompt, sampled = (float(part) for part in text.split(","))
        except ValueError:
            prompt = sampled = -1.0
        if not (0 <= prompt < _MILLION and 0 <= sampled < _MILLION):
            raise ConfigError(
                f"--price {text!r}: expected the prices of a million prompt and sampled tokens, as in 0.5,1.5"
            )
        return cls(prompt, sampled)


@dataclass(frozen=True)
class Figures:
    """The figures of some whole rows."""

    rows: int
    avg: Estimate
    """Mean reward."""
    passes: dict[int, Estimate]
    """pass@k by k: the powers of two up to the number of samples, and that number."""
    calls: float
    """Calls of a conversation, on average; so with the next ones."""
    tokens: float
    """Tokens that were sampled."""
    cached: float | None
    """Share of the prompts' tokens that the engine had in its cache; None: not reported."""
    seconds: float
    """Seconds from its begin to its end, which depend on the machine's other work."""
    cost: float | None
    """The cost of all these conversations; None: no price was given."""


def figures_of(rows: Sequence[EvaluatedRow], samples: int, price: Price | None = None) -> Figures | None:
    """Return the figures of some whole rows; None without rows.

    Args:
        rows: The rows.
        samples: Number of samples that each of them has.
        price: The price of tokens; None: not known.
    """
    conversations = [sample for row in rows for sample in row.samples]
    share = is_share([sample.score for sample in conversations if sample.score is not None])
    avg = estimate([row.score for row in rows], len(conversations), share=share)
    if avg is None:
        return None
    passes = {}
    for k in sorted({samples, *(1 << power for power in range(samples.bit_length()))}):
        # Choices of k samples that share none are independent; any others are not.
        answers = len(rows) * (samples // k)
        if (found := estimate([pass_at_k(samples, row.right, k) for row in rows], answers)) is not None:
            passes[k] = found
    return Figures(
        rows=len(rows),
        avg=avg,
        passes=passes,
        calls=fmean(sample.calls for sample in conversations),
        tokens=fmean(sample.tokens for sample in conversations),
        cached=_cached(conversations),
        seconds=fmean(sample.seconds for sample in conversations),
        cost=None if price is None else _cost(conversations, price),
    )


def by_source(results: Results, price: Price | None = None) -> dict[str, Figures]:
    """Return the figures of the rows that are shown by data source, in the order of the rows."""
    groups: dict[str, list[EvaluatedRow]] = {}
    for row in results.shown:
        groups.setdefault(row.data_source, []).append(row)
    made = {source: figures_of(rows, results.evaluation.samples, price) for source, rows in groups.items()}
    return {source: figures for source, figures in made.items() if figures is not None}


def _cached(conversations: Sequence[EvaluatedSample]) -> float | None:
    known = [sample for sample in conversations if sample.cached_tokens is not None]
    given = sum(sample.prompt_tokens for sample in known)
    return sum(sample.cached_tokens or 0 for sample in known) / given if given else None


def _cost(conversations: Sequence[EvaluatedSample], price: Price) -> float:
    given, sampled = sum(each.prompt_tokens for each in conversations), sum(each.tokens for each in conversations)
    return (given * price.prompt + sampled * price.sampled) / _MILLION
