"""Do the intervals of evaluations cover the truth, and does a comparison find a difference, and none among equals?

    python -m benchmarks.estimates [--simulations 4000] [--seed 0] [--out FILE]

Settings of rows, samples, k and difficulty. A model solves each row with a probability of that row's own, which is
drawn from a beta distribution; its samples are independent. So the truth is known: E[1 - (1 - p)^k]. Each simulation
draws rows and samples anew, and asks whether the interval of `estimates.estimate` covers the truth.

Beside it the interval that most use, Student's t over the rows (`t_covers`). `differences` are settings of two models,
whose true difference is known as well; in some, rewards are ten times as large, so that they are not shares. `floor` is
the part of the intervals that are as wide as they are because few rows differ: all rows count as no more answers than
there are rows that differ, or half an interval is Wilson's of 0 of all rows. A floor binds a setting (`binds`) where
that is so in more than 5 % of its simulations, and up to eight rows, whose quantile of Student's t is wide on purpose.

`paired` compares two models on 128 rows with 8 samples each: how often p < 0.05 where both are equal (`false`), and
where the second is right 0.04 more often (`found`), each row's odds being larger by the same factor; `unpaired_found`
is the same for a comparison of the two means without pairing (Welch). `least_p_over_floor` is the least p over 2^(1 -
n) with n the rows that differ, over all comparisons of this command, and 100 per simulation of few rows whose gains are
nearly equal.

Of 1,000 simulations a share is known to 0.7 %, of 4,000 to 0.35 %.

Last line: one JSON object. The status is 1 if an interval covers less than 93 %, or more than 97.5 % where no floor
binds, if a p is below that of the signs, if more than 7 % of equal models differ, or if a difference is found in less
than 55 %. The last does not bind `undecided` rows: their samples are so noisy that no comparison of 8 can find it more
often.
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

from verl_multiturn.evaluation.estimates import (
    CONFIDENCE,
    Interval,
    PairedDifference,
    effective_rows,
    estimate,
    paired,
    pass_at_k,
    varied,
    wilson,
)
from verl_multiturn.evaluation.student_t import t_quantile, two_sided_p

COVERS, FALSE, FOUND = (0.93, 0.975), 0.07, 0.55
BINDS, FEW_ROWS = 0.05, 8
"""Share of simulations with a floor above which it binds a setting; and rows up to which Student's t does."""
ROWS, SAMPLES, BETTER = 128, 8, 0.04
Floats = Any


class Setting(NamedTuple):
    """Rows that are drawn, and the figure to estimate."""

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
FEW = (  # a first look, and a smoke run
    Setting(1, 8, 1, 2, 2),
    Setting(2, 8, 1, 2, 2),
    Setting(3, 4, 1, 1, 1),
    Setting(4, 8, 1, 0.3, 0.3),
    Setting(4, 8, 8, 2, 8),
    Setting(8, 1, 1, 1, 1),
    Setting(8, 8, 1, 0.3, 0.3),
    Setting(16, 8, 1, 0.1, 9.9),
    Setting(16, 8, 4, 1, 1),
    Setting(16, 8, 1, 8, 2),
    Setting(24, 8, 4, 1, 1),
    Setting(50, 8, 2, 5, 1),
)


class Compared(NamedTuple):
    """Rows that are drawn for two models, and how much better the second one is."""

    rows: int
    samples: int
    a: float
    b: float
    better: float
    """True difference of the means of shares."""
    scale: float = 1.0
    """Reward of a right answer; above 1 the rewards are not shares."""


DIFFERENCES = (
    Compared(128, 8, 0.3, 0.3, 0.0),
    Compared(128, 8, 0.3, 0.3, BETTER),
    Compared(128, 8, 2, 8, BETTER),
    Compared(128, 8, 0.1, 9.9, 0.0),
    Compared(128, 1, 1, 1, 0.1),
    Compared(500, 4, 0.5, 2, 0.02),
    Compared(30, 8, 1, 1, BETTER),
    Compared(16, 8, 2, 2, 0.1),
    Compared(8, 8, 2, 2, 0.1),
    Compared(8, 1, 1, 1, 0.2),
    Compared(5, 8, 1, 1, 0.2),
    Compared(3, 4, 1, 1, 0.2),
    Compared(2, 8, 2, 2, 0.0),
    Compared(1, 8, 2, 2, 0.1),
    Compared(128, 8, 0.3, 0.3, BETTER, 10),
    Compared(30, 8, 1, 1, BETTER, 10),
    Compared(16, 8, 2, 2, 0.1, 10),
    Compared(12, 8, 2, 2, 0.1, 10),
)
DIFFICULTIES = {"mixed": (0.3, 0.3), "even": (1.0, 1.0), "hard": (2.0, 8.0), "undecided": (2.0, 2.0)}
"""Of the rows that are compared. `undecided` rows are right about half the time."""


def covered(setting: Setting, simulations: int, random: np.random.Generator) -> dict[str, Any]:
    """Return how often the intervals of a setting cover the truth."""
    shares = [pass_at_k(setting.samples, right, setting.k) for right in range(setting.samples + 1)]
    hits = {"covers": 0, "t_covers": 0}
    widths, floors, total = [], 0, setting.rows * (setting.samples // setting.k)
    for _ in range(simulations):
        right = random.binomial(setting.samples, random.beta(setting.a, setting.b, setting.rows))
        values = [shares[each] for each in right]
        found = estimate(values, total)
        assert found is not None
        assert found.interval is not None
        hits["covers"] += _holds(found.interval, setting.truth)
        hits["t_covers"] += _holds(_t_interval(values), setting.truth)
        widths.append(_width(found.interval))
        least = setting.rows * varied(values)
        floors += effective_rows(values, total) == least < total
    counted = {name: round(hit / simulations, 4) for name, hit in hits.items()}
    figures = {"width": round(fmean(widths), 4), "floor": round(floors / simulations, 4)}
    return {
        **setting._asdict(),
        "truth": round(setting.truth, 4),
        **counted,
        **figures,
        "binds": _binds(setting, figures),
    }


def _binds(setting: Setting | Compared, figures: dict[str, float]) -> bool:
    return figures["floor"] > BINDS or setting.rows <= FEW_ROWS


def _holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def _t_interval(values: list[float]) -> Interval:
    """Return the interval of Student's t; of one row that of no width."""
    mean, rows = fmean(values), len(values)
    half = t_quantile(CONFIDENCE, rows - 1) * math.sqrt(variance(values) / rows) if rows > 1 else 0.0
    return Interval(mean - half, mean + half)


class Floor:
    """The least p over that of the signs."""

    def __init__(self) -> None:
        self.least = math.inf

    def paired(self, first: list[float], second: list[float], share: bool = True) -> PairedDifference:
        """Compare two models, and keep the least p over 2^(1 - n)."""
        found = paired(first, second, share=share)
        assert found is not None
        differ = sum(abs(b - a) > 1e-9 * max(1.0, abs(a), abs(b)) for a, b in zip(first, second, strict=True))
        self.least = min(self.least, found.p / min(1.0, 2.0 ** (1 - differ)))
        return found


def differences_covered(
    setting: Compared, simulations: int, random: np.random.Generator, floor: Floor
) -> dict[str, Any]:
    """Return how often the intervals of a difference cover the truth, of the simulations that have one."""
    factor = _factor(setting.a, setting.b, setting.better)
    hits = floors = having = 0
    widths = [0.0]
    for _ in range(simulations):
        chances = random.beta(setting.a, setting.b, setting.rows)
        both = (
            random.binomial(setting.samples, each) / setting.samples for each in (chances, _better(chances, factor))
        )
        first, second = ((each * setting.scale).tolist() for each in both)
        found = floor.paired(first, second, setting.scale == 1)
        if found.interval is None:
            continue
        having += 1
        hits += _holds(found.interval, setting.scale * setting.better)
        widths.append(_width(found.interval))
        if setting.scale == 1:
            differences = [b - a for a, b in zip(first, second, strict=True)]
            least = wilson(0.0, setting.rows, t_quantile(CONFIDENCE, max(1, setting.rows - 1))).high
            floors += _width(_t_interval(differences)) / 2 < least
    figures = {"width": round(fmean(widths[1:] or widths), 4), "floor": round(floors / simulations, 4)}
    covers = round(hits / having, 4) if having else None
    without = round(1 - having / simulations, 4)
    return {**setting._asdict(), "covers": covers, "without": without, **figures, "binds": _binds(setting, figures)}


def nearly_equal(simulations: int, random: np.random.Generator, floor: Floor) -> None:
    """Compare models whose rows gain nearly the same: few of them, by amounts from 1e-12 to 1, and some not at all."""
    for _ in range(simulations):
        rows = int(random.integers(1, 13))
        spread, scale = 10.0 ** random.uniform(-13, 0), float(random.choice([1.0, 10.0, 1e6]))
        gains = (1 - spread * random.random(rows)) * random.choice([0.0, 1.0], rows, p=[0.2, 0.8])
        first = random.choice([0.0, 0.0, 0.25], rows) * scale
        second = first + gains * scale * float(random.choice([0.75, 0.1, -0.25]))
        floor.paired(first.tolist(), second.tolist(), share=scale == 1)


def _width(interval: Interval) -> float:
    return interval.high - interval.low


def compared(a: float, b: float, simulations: int, random: np.random.Generator, floor: Floor) -> dict[str, float]:
    """Return how often two models differ that are equal, and two that do differ."""
    factor = _factor(a, b, BETTER)
    hits = {"false": 0, "found": 0, "unpaired_found": 0}
    for _ in range(simulations):
        chances = random.beta(a, b, ROWS)
        better = _better(chances, factor)
        first, same, second = (random.binomial(SAMPLES, each) / SAMPLES for each in (chances, chances, better))
        for name, other in (("false", same), ("found", second)):
            hits[name] += floor.paired(first.tolist(), other.tolist()).p < 0.05
        hits["unpaired_found"] += _unpaired_p(first.tolist(), second.tolist()) < 0.05
    return {name: round(hit / simulations, 4) for name, hit in hits.items()}


def _better(chances: Floats, factor: float) -> Floats:
    return factor * chances / (1 - chances + factor * chances)


def _factor(a: float, b: float, better: float) -> float:
    """Return the factor of all odds with which models are right more often by `better`."""
    if not better:
        return 1.0
    chances = np.random.default_rng(0).beta(a, b, 200_000)
    low, high = 1.0, 100.0
    for _ in range(60):
        factor = math.sqrt(low * high)
        gained = float(np.mean(_better(chances, factor) - chances))
        low, high = (low, factor) if gained > better else (factor, high)
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
    began, random, floor = time.monotonic(), np.random.default_rng(options.seed), Floor()
    settings = [covered(setting, options.simulations, random) for setting in SETTINGS]
    pairs = {name: compared(a, b, options.simulations, random, floor) for name, (a, b) in DIFFICULTIES.items()}
    settings += [covered(setting, options.simulations, random) for setting in FEW]
    print("rows samples  k  beta        truth   covers  width   t covers   floor")
    for each in settings:
        beta = f"{each['a']:g}, {each['b']:g}"
        print(f"{each['rows']:4d} {each['samples']:7d} {each['k']:2d}  {beta:10s} {each['truth']:6.3f}   "
              f"{each['covers']:.3f}   {each['width']:.3f}   {each['t_covers']:.3f}  {each['floor']:8.3f}")  # fmt: skip
    print(f"\n{ROWS} rows x {SAMPLES}, +{BETTER}    false   found   found without pairing")
    for name, found in pairs.items():
        print(f"{name:22s} {found['false']:.3f}   {found['found']:.3f}   {found['unpaired_found']:.3f}")
    differences = [differences_covered(setting, options.simulations, random, floor) for setting in DIFFERENCES]
    print("\nrows samples  beta        better  scale  covers  width   without  floor")
    for each in differences:
        beta, covers = f"{each['a']:g}, {each['b']:g}", "-" if each["covers"] is None else f"{each['covers']:.3f}"
        print(f"{each['rows']:4d} {each['samples']:7d}  {beta:10s} {each['better']:6.3f}  {each['scale']:5g}  "
              f"{covers:6s} {each['width']:6.3f}   {each['without']:.3f}    {each['floor']:.3f}")  # fmt: skip
    nearly_equal(100 * options.simulations, random, floor)
    print(f"\nleast p over that of the signs: {floor.least:.6g}")
    known = [each for each in [*settings, *differences] if each["covers"] is not None]
    out = [each for each in known if not COVERS[0] <= each["covers"] <= (1.0 if each["binds"] else COVERS[1])]
    bad = [
        name
        for name, found in pairs.items()
        if found["false"] > FALSE or (found["found"] < FOUND and name != "undecided")
    ]
    result = {
        "simulations": options.simulations,
        "seed": options.seed,
        "least_covered": min(each["covers"] for each in known),
        "most_covered": max(each["covers"] for each in known if not each["binds"]),
        "least_p_over_floor": floor.least,
        "settings": settings,
        "differences": differences,
        "paired": pairs,
        "out_of_bounds": len(out) + len(bad) + (floor.least < 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 1 if result["out_of_bounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
