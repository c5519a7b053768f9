"""Estimates from a sample of rows: a mean with its interval, pass@k, and the difference of two models.

The rows are the sample: the question is how a model does on rows like these. The samples of one row predict little
about others, so an interval is made of the rows' values, of which each row has one.

Invariants:
- an interval has a width unless the rows hold no evidence at all, also where all rows are right or all are wrong;
- rows that are nearly alike are no better evidence than rows that are alike: p is at least that of the signs, and an
  interval is made of a spread that several rows show;
- nothing is estimated without data: a number that cannot be computed is None, and its reason is a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from verl_multiturn.evaluation.student_t import t_quantile, two_sided_p
from verl_multiturn.rows.reward_numbers import are_equal

CONFIDENCE = 0.95
FEWEST_VARIED = 8
"""Rows that must differ before rewards outside [0, 1] have an interval: only the rows show their spread."""
_NOTHING = 1e-9
"""A gain up to this size is none: differences of small numbers have no size to be compared with."""
_TOO_LARGE = "the rewards are too large for a float's square"


class Interval(NamedTuple):
    """An interval that covers the truth with probability `CONFIDENCE`."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over rows."""

    mean: float
    interval: Interval | None
    """None: the spread of the rows is unknown; `no_interval` gives the reason."""
    rows: int
    no_interval: str = ""
    """Why there is no interval; empty where there is one."""


class PairedDifference(NamedTuple):
    """By how much a second model's rows are better than a first one's."""

    mean: float
    interval: Interval | None
    """None: the spread of the differences is unknown; `no_interval` gives the reason."""
    p: float
    """Probability of a difference at least as large as this one between models that are equal."""
    rows: int
    differ: int
    """Number of rows that differ. `p` is at least 2^(1 - differ), that of the signs."""
    no_interval: str = ""
    """Why there is no interval; empty where there is one."""


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


def is_share(rewards: Sequence[float]) -> bool:
    """Return whether all rewards lie in [0, 1], so that their mean is a share of the best that there is."""
    return all(0.0 <= reward <= 1.0 for reward in rewards)


def estimate(values_R: Sequence[float], samples: int, *, share: bool = True) -> Estimate | None:
    """Return the mean of the rows' values, with its interval; None without rows.

    A share gets Wilson's interval, with the effective number of rows in the place of n: that of independent right and
    wrong answers whose mean would vary as much as the rows' mean does (Korn and Graubard, Survey Methodology 24, 1998).
    Other values get the interval of Student's t, which assumes that their mean varies as a normal number does; below
    `FEWEST_VARIED` rows that differ they get none.

    Args:
        values_R: A value for each row, such as the mean of its rewards or its pass@k.
        samples: Number of all samples; of pass@k that of all choices of k samples which share none. No more than so
            many answers can be independent.
        share: Whether each value lies in [0, 1].
    """
    rows = len(values_R)
    if not rows:
        return None
    mean = fmean(values_R)
    if share:
        within = t_quantile(CONFIDENCE, max(1, rows - 1))
        return Estimate(mean, wilson(mean, effective_rows(values_R, samples), within), rows)
    if few := _too_few(varied(values_R)):
        return Estimate(mean, None, rows, few)
    half = t_quantile(CONFIDENCE, rows - 1) * math.sqrt(_variance(values_R, mean) / rows)
    if not math.isfinite(half):
        return Estimate(mean, None, rows, _TOO_LARGE)
    return Estimate(mean, Interval(mean - half, mean + half), rows)


def effective_rows(values_R: Sequence[float], samples: int) -> float:
    """Return how many independent answers are as much evidence as the rows: m (1 - m) / variance of their mean.

    Where all rows are alike, their spread is unknown: each counts as one answer. Where few differ, it is uncertain:
    each row counts as no more answers than there are rows that differ (`varied`).
    """
    rows, mean = len(values_R), fmean(values_R)
    spread = _variance(values_R, mean) if rows > 1 else 0.0
    most = min(samples, rows * varied(values_R))
    return min(mean * (1 - mean) * rows / spread, most) if spread and 0.0 < mean < 1.0 else most


def varied(values: Sequence[float]) -> int:
    """Return how many values show the spread of all: those that differ from the commonest one, which counts once.

    Examples: 1 of [5, 5, 5], 2 of [5, 5, 5, 5.01], 4 of [1, 2, 3, 4].
    """
    ordered, most, run = sorted(values), 0, 0
    for at, value in enumerate(ordered):
        run = run + 1 if at and gain(ordered[at - 1], value) == 0 else 1
        most = max(most, run)
    return len(ordered) - most + 1 if ordered else 0


def _too_few(count: int) -> str:
    """Return why rewards of which so many rows differ have no interval; empty where they have one."""
    if count >= FEWEST_VARIED:
        return ""
    return f"rows that differ: {count}; an interval of rewards outside [0, 1] needs {FEWEST_VARIED}"


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


def paired(first_R: Sequence[float], second_R: Sequence[float], *, share: bool = True) -> PairedDifference | None:
    """Return by how much the second values are larger, compared row by row; None without rows.

    Interval and p are those of Student's t over the rows' differences, with two floors, since that test believes a
    spread however few rows show it:

    - p is at least that of the signs, 2^(1 - n) of n rows that differ, even if all of them gain nearly the same;
    - half an interval of shares is at least Wilson's interval of 0 of all rows, as if a row that was not seen might
      differ by 1. Of other rewards there is no interval below `FEWEST_VARIED` rows that differ, and differ by other
      amounts.

    Args:
        first_R: A value for each row, of the first model.
        second_R: The same of the second, in the same order.
        share: Whether each value lies in [0, 1].
    """
    differences = [gain(a, b) for a, b in zip(first_R, second_R, strict=True)]
    rows = len(differences)
    if not rows:
        return None
    mean, differ = fmean(differences), sum(difference != 0 for difference in differences)
    error = math.sqrt(_variance(differences, mean) / rows) if rows > 1 else 0.0
    is_spread = varied(differences) > 1
    p = max(two_sided_p(mean / error, rows - 1) if is_spread else 0.0, min(1.0, 2.0 ** (1 - differ)))
    quantile = t_quantile(CONFIDENCE, max(1, rows - 1))
    half = quantile * error
    if share:
        half = max(half, wilson(0.0, rows, quantile).high)
        return PairedDifference(mean, Interval(max(-1.0, mean - half), min(1.0, mean + half)), p, rows, differ)
    why = _too_few(min(differ, varied(differences))) or ("" if math.isfinite(half) else _TOO_LARGE)
    return PairedDifference(mean, None if why else Interval(mean - half, mean + half), p, rows, differ, why)


def gain(first: float, second: float) -> float:
    """Return by how much a second value is larger; 0 where both are the same but for rounding (`are_equal`)."""
    return 0.0 if abs(second - first) <= _NOTHING or are_equal((first, second)) else second - first


def _variance(values: Sequence[float], mean: float) -> float:
    """Return the variance of values, with n - 1: `statistics.variance` of floats, 20 times as fast."""
    try:
        return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    except OverflowError:  # of rewards beyond 1e150
        return math.inf
