"""Student's t: the two numbers of it that an interval and a p value need, without SciPy.

Both come from the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22, evaluated by Lentz's
method). They agree with SciPy's to ten digits; a test compares them.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_TERMS = 10_000


def two_sided_p(t: float, degrees: int) -> float:
    """Return the probability that Student's t is at least as far from 0 as `t`.

    Args:
        t: The statistic; it may be infinite.
        degrees: Degrees of freedom, at least 1.
    """
    return (
        0.0
        if math.isinf(t)
        else _incomplete_beta(degrees / (degrees + t * t), t * t / (degrees + t * t), degrees / 2, 0.5)
    )


@lru_cache(maxsize=1024)
def t_quantile(confidence: float, degrees: int) -> float:
    """Return the `t` within which Student's t lies with this probability. Example: 2.776 of 0.95 and 4 degrees."""
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > 1 - confidence:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided_p(middle, degrees) > 1 - confidence else (low, middle)
    return high


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function of x; y is 1 - x, without its rounding."""
    if y == 0:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there
        return 1.0 - _incomplete_beta(y, x, b, a)
    if x == 0:
        return 0.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log(y) - log_beta) / a / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    value, c, d = 1.0, 1.0, 0.0
    for number in range(1, _TERMS):
        half = number // 2
        if number % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1.0 / (1.0 + term * d or _TINY)
        c = 1.0 + term / c or _TINY
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value
