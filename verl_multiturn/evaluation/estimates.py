"""Estimates from a sample of rows: a mean with its interval, pass@k, and the difference of two models.

The rows are the sample: what is asked is how a model does on rows like these. The samples of one row say little about
others, so an interval is made of the rows' values, of which each row has one.

Invariants:
- an interval has a width unless the rows say nothing at all, also where all rows are right or all are wrong;
- nothing is estimated of what is not there: a number that cannot be had is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from verl_multiturn.evaluation.student import t_quantile, two_sided_p

CONFIDENCE = 0.95
_ROUNDING = 1e-9
"""Differences of means that are no further apart are equal."""


class Interval(NamedTuple):
    """An interval that covers the truth with probability `CONFIDENCE`."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over rows."""

    mean: float
    interval: Interval | None
    """None: one row that is no share, or rewards too large for a float's square, whose spread nothing tells."""
    rows: int


class Difference(NamedTuple):
    """By how much a second model's rows are better than a first one's."""

    mean: float
    interval: Interval | None
    """None: all rows differ by the same, and are no shares; or rewards too large for a float's square."""
    p: float
    """Probability of a difference at least as large as this one between models that are equal."""
    rows: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of a row (Chen et al., arXiv 2107.03374).

    That is 1 - C(n-c, k) / C(n, k), the share of all choices of k of n samples in which one of the c that passed is.
    Its expectation is pass@k for every n that is at least k; that of 1 - (1 - c/n)^k is less.

    Args:
        samples: Number of its samples, at least `k`.
        passed: Number of those that pass.
        k: Number of samples of which one should pass, at least 1.

    Raises:
        ValueError: The numbers do not fit.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(
            f"{passed} of {samples} samples and k={k}: expected 0 <= passed <= samples and 1 <= k <= samples"
        )
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def is_right(score: float, acc: float = 1.0) -> bool:
    """Tell whether a valid conversation solved its task: its score is more than 0, and so is what it reported as `acc`.

    Args:
        score: Its reward.
        acc: The `acc` that its reward function reported, if any.
    """
    return score > 0 and acc > 0


def is_share(rewards: Sequence[float]) -> bool:
    """Tell whether all rewards lie in [0, 1], so that their mean is a share of the best that there is."""
    return all(0.0 <= reward <= 1.0 for reward in rewards)


def estimate(values_R: Sequence[float], samples: int, *, share: bool = True) -> Estimate | None:
    """Return the mean of the rows' values, with its interval; None without rows.

    A share gets Wilson's interval, with the effective number of rows in the place of n: that of independent right and
    wrong answers whose mean would vary as much as the rows' mean does (Korn and Graubard, Survey Methodology 24, 1998).
    Other values get the interval of Student's t, which assumes that their mean varies as a normal number does.

    Args:
        values_R: A value for each row, such as the mean of its rewards or its pass@k.
        samples: Number of all samples. No more than so many answers can be independent.
        share: Whether each value lies in [0, 1].
    """
    rows = len(values_R)
    if not rows:
        return None
    mean = fmean(values_R)
    if share:
        within = t_quantile(CONFIDENCE, max(1, rows - 1))
        return Estimate(mean, wilson(mean, effective_rows(values_R, samples), within), rows)
    if rows < 2:
        return Estimate(mean, None, rows)
    half = t_quantile(CONFIDENCE, rows - 1) * math.sqrt(_variance(values_R, mean) / rows)
    return Estimate(mean, Interval(mean - half, mean + half) if math.isfinite(half) else None, rows)


def effective_rows(values_R: Sequence[float], samples: int) -> float:
    """Return how many independent answers tell as much as the rows do: m (1 - m) / variance of their mean.

    Where all rows are right, all are wrong, or there is one row, nothing tells their spread: each counts as one answer.
    """
    rows, mean = len(values_R), fmean(values_R)
    spread = _variance(values_R, mean) if rows > 1 else 0.0
    if not 0.0 < mean < 1.0 or rows < 2:
        return rows
    return min(mean * (1 - mean) * rows / spread, samples) if spread else samples


def wilson(mean: float, n: float, within: float) -> Interval:
    """Return Wilson's interval of a share (Wilson, JASA 22, 1927).

    Args:
        mean: The share that was seen.
        n: Number of answers that it was seen in.
        within: Quantile: 1.96 for 95 % with a spread that is known.
    """
    squared = within * within
    centre = (mean + squared / (2 * n)) / (1 + squared / n)
    half = within / (1 + squared / n) * math.sqrt(mean * (1 - mean) / n + squared / (4 * n * n))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired(first_R: Sequence[float], second_R: Sequence[float], *, share: bool = True) -> Difference | None:
    """Return by how much the second values are larger, compared row by row; None without rows.

    Interval and p are those of Student's t over the rows' differences. Where all rows differ by the same, the spread is
    not known: p is then that of the signs, and of shares the interval is as wide as Wilson's, as if a row that was not
    seen might differ by 1.

    Args:
        first_R: A value for each row, of the first model.
        second_R: The same of the second, in the same order.
        share: Whether each value lies in [0, 1].
    """
    differences = [b - a for a, b in zip(first_R, second_R, strict=True)]
    rows = len(differences)
    if not rows:
        return None
    mean = fmean(differences)
    if max(differences) - min(differences) <= _ROUNDING:
        p = 2.0 ** (1 - rows) if abs(mean) > _ROUNDING else 1.0
        half = wilson(0.0, rows, t_quantile(CONFIDENCE, max(1, rows - 1))).high
        interval = Interval(max(-1.0, mean - half), min(1.0, mean + half)) if share else None
        return Difference(mean, interval, p, rows)
    error = math.sqrt(_variance(differences, mean) / rows)
    half, most = t_quantile(CONFIDENCE, rows - 1) * error, 1.0 if share else math.inf
    interval = Interval(max(-most, mean - half), min(most, mean + half)) if math.isfinite(half) else None
    return Difference(mean, interval, two_sided_p(mean / error, rows - 1), rows)


def _variance(values: Sequence[float], mean: float) -> float:
    """Return the variance of values, with n - 1: `statistics.variance` of floats, 20 times as fast."""
    try:
        return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    except OverflowError:  # of rewards beyond 1e150
        return math.inf
