"""Do the intervals of evaluations cover the truth, and does a comparison find a difference, and none among equals?

    python -m benchmarks.estimates [--simulations 4000] [--seed 0] [--out FILE]

Ten settings of rows, samples, k and difficulty. A model solves each row with a probability of that row's own, which is
drawn from a beta distribution; its samples are independent. So the truth is known: E[1 - (1 - p)^k]. Each simulation
draws rows and samples anew, and asks whether the interval of `estimates.estimate` covers the truth.

Beside it the interval that most use, Student's t over the rows (`t_covers`). `paired` compares two models on 128 rows
with 8 samples each: how often p < 0.05 where both are equal (`false`), and where the second is right 0.04 more often
(`found`), each row's odds being larger by the same factor; `unpaired_found` is what a comparison of the two means
without pairing finds (Welch).

Of 1,000 simulations a share is known to 0.7 %, of 4,000 to 0.35 %.

Last line: one JSON object. The status is 1 if an interval covers less than 93 % or more than 97.5 %, if more than 7 %
of equal models differ, or if a difference is found in less than 55 %. The last does not bind `undecided` rows: their
samples are so noisy that no comparison of 8 can find it more often.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import numpy as np

from verl_multiturn.evaluation.estimates import Interval, estimate, paired, pass_at_k
from verl_multiturn.evaluation.student import two_sided_p

COVERS, FALSE, FOUND = (0.93, 0.975), 0.07, 0.55
ROWS, SAMPLES, BETTER = 128, 8, 0.04
Floats = Any


class Setting(NamedTuple):
    """Rows that are drawn, and what is asked of them."""

    rows: int
    samples: int
    k: int
    a: float
    """The two parameters of the beta distribution of the rows' probabilities."""
    b: float

    @property
    def truth(self) -> float:
        """E[1 - (1 - p)^k]."""
        a, b, k = self.a, self.b, self.k
        return 1 - math.exp(math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k))


SETTINGS = (
    Setting(128, 8, 1, 0.3, 0.3),
    Setting(128, 8, 4, 0.3, 0.3),
    Setting(128, 8, 8, 0.3, 0.3),
    Setting(30, 8, 1, 2, 8),
    Setting(30, 8, 8, 2, 8),
    Setting(128, 8, 1, 0.1, 9.9),  # 1 % right
    Setting(128, 8, 8, 0.1, 9.9),
    Setting(128, 8, 1, 9.9, 0.1),  # 99 % right
    Setting(64, 1, 1, 1, 1),
    Setting(500, 4, 2, 0.5, 2),
)
DIFFICULTIES = {"mixed": (0.3, 0.3), "even": (1.0, 1.0), "hard": (2.0, 8.0), "undecided": (2.0, 2.0)}
"""Of the rows that are compared. `undecided` rows are right about half the time."""


def covered(setting: Setting, simulations: int, random: np.random.Generator) -> dict[str, Any]:
    """Return how often the intervals of a setting cover the truth."""
    shares = [pass_at_k(setting.samples, right, setting.k) for right in range(setting.samples + 1)]
    hits = {"covers": 0, "t_covers": 0}
    widths = []
    for _ in range(simulations):
        right = random.binomial(setting.samples, random.beta(setting.a, setting.b, setting.rows))
        values = [shares[each] for each in right]
        for name, share in (("covers", True), ("t_covers", False)):
            found = estimate(values, setting.rows * setting.samples, share=share)
            assert found is not None
            assert found.interval is not None
            hits[name] += found.interval.low <= setting.truth <= found.interval.high
            widths += [_width(found.interval)] if share else []
    counted = {name: round(hit / simulations, 4) for name, hit in hits.items()}
    return {**setting._asdict(), "truth": round(setting.truth, 4), **counted, "width": round(fmean(widths), 4)}


def _width(interval: Interval) -> float:
    return interval.high - interval.low


def compared(a: float, b: float, simulations: int, random: np.random.Generator) -> dict[str, float]:
    """Return how often two models differ that are equal, and two that do differ."""
    factor = _factor(a, b)
    hits = {"false": 0, "found": 0, "unpaired_found": 0}
    for _ in range(simulations):
        chances = random.beta(a, b, ROWS)
        better = factor * chances / (1 - chances + factor * chances)
        first, same, second = (random.binomial(SAMPLES, each) / SAMPLES for each in (chances, chances, better))
        for name, other in (("false", same), ("found", second)):
            found = paired(first.tolist(), other.tolist())
            assert found is not None
            hits[name] += found.p < 0.05
        hits["unpaired_found"] += _unpaired_p(first.tolist(), second.tolist()) < 0.05
    return {name: round(hit / simulations, 4) for name, hit in hits.items()}


def _factor(a: float, b: float) -> float:
    """Return the factor of all odds with which models are right `BETTER` more often."""
    chances = np.random.default_rng(0).beta(a, b, 200_000)
    low, high = 1.0, 100.0
    for _ in range(60):
        factor = math.sqrt(low * high)
        gained = float(np.mean(factor * chances / (1 - chances + factor * chances) - chances))
        low, high = (low, factor) if gained > BETTER else (factor, high)
    return low


def _unpaired_p(first: list[float], second: list[float]) -> float:
    error = math.sqrt((variance(first) + variance(second)) / ROWS)
    return two_sided_p((fmean(second) - fmean(first)) / error, 2 * ROWS - 2)


def main() -> int:
    """Run all simulations, print the tables, and return 1 where a figure is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the last line")
    options = parser.parse_args()
    began, random = time.monotonic(), np.random.default_rng(options.seed)
    settings = [covered(setting, options.simulations, random) for setting in SETTINGS]
    print("rows samples  k  beta        truth   covers  width   t covers")
    for each in settings:
        beta = f"{each['a']:g}, {each['b']:g}"
        print(f"{each['rows']:4d} {each['samples']:7d} {each['k']:2d}  {beta:10s} {each['truth']:6.3f}   "
              f"{each['covers']:.3f}   {each['width']:.3f}   {each['t_covers']:.3f}")  # fmt: skip
    pairs = {name: compared(a, b, options.simulations, random) for name, (a, b) in DIFFICULTIES.items()}
    print(f"\n{ROWS} rows x {SAMPLES}, +{BETTER}    false   found   found without pairing")
    for name, found in pairs.items():
        print(f"{name:22s} {found['false']:.3f}   {found['found']:.3f}   {found['unpaired_found']:.3f}")
    out = [each for each in settings if not COVERS[0] <= each["covers"] <= COVERS[1]]
    bad = [
        name
        for name, found in pairs.items()
        if found["false"] > FALSE or (found["found"] < FOUND and name != "undecided")
    ]
    result = {
        "simulations": options.simulations,
        "seed": options.seed,
        "least_covered": min(each["covers"] for each in settings),
        "most_covered": max(each["covers"] for each in settings),
        "settings": settings,
        "paired": pairs,
        "out_of_bounds": len(out) + len(bad),
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 1 if out or bad else 0


if __name__ == "__main__":
    sys.exit(main())
