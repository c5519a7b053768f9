"""The arithmetic of `benchmarks.reflection`: curves over sampled tokens, their differences with intervals, the picture.

A curve has a point for each validation: the tokens that were sampled for training until then, and of each held-out row
whether its first and its final answer were right. Between two validations a row's value is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from verl_multiturn.evaluation.estimates import CONFIDENCE, Estimate, PairedDifference, estimate, paired
from verl_multiturn.evaluation.student_t import t_quantile
from verl_multiturn.evaluation.tables import interval_json

Answer = Literal["first", "final"]
COMPARED: Mapping[str, tuple[Answer, Answer]] = {
    "answer": ("first", "final"),
    "first": ("first", "first"),
    "final": ("final", "final"),
}
"""Which answer of the arm with one try is compared with which of the arm with two.

`answer` is the main one, as AReaL reports: an arm is measured as it was trained.
"""
_PICTURE_POINTS = 40


class Point(NamedTuple):
    """A validation."""

    tokens: float
    """Tokens that were sampled for training before it."""
    first: list[float]
    """Score of each held-out row's first answer, in the rows' order: 1.0 where it was right."""
    final: list[float]
    """The same of the last answer."""


Curve = Sequence[Point]


def values_at(curve: Curve, tokens: float, answer: Answer) -> list[float]:
    """Return each row's value at a number of sampled tokens, interpolated between the validations around it.

    Raises:
        ValueError: The curve does not reach so far.
    """
    for before, after in pairwise(curve):
        if before.tokens <= tokens <= after.tokens:
            share = (tokens - before.tokens) / (after.tokens - before.tokens)
            rows = zip(getattr(before, answer), getattr(after, answer), strict=True)
            return [low + share * (high - low) for low, high in rows]
    raise ValueError(f"{tokens} tokens: expected {curve[0].tokens} to {curve[-1].tokens}, those of the curve")


def values_until(curve: Curve, tokens: float, answer: Answer) -> list[float]:
    """Return each row's mean value over the tokens from 0 to `tokens`: the area below its curve, over the width.

    Raises:
        ValueError: The curve does not reach so far, or does not begin at 0.
    """
    if curve[0].tokens:
        raise ValueError(f"the curve begins at {curve[0].tokens} tokens; expected 0")
    ends = [(point.tokens, getattr(point, answer)) for point in curve if point.tokens < tokens]
    ends.append((tokens, values_at(curve, tokens, answer)))
    areas = [
        [(right - left) * (low + high) / 2 for low, high in zip(before, after, strict=True)]
        for (left, before), (right, after) in pairwise(ends)
    ]
    return [math.fsum(own) / tokens for own in zip(*areas, strict=True)]


def mean_of(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return each row's mean over seeds."""
    return [fmean(values) for values in zip(*curves, strict=True)]


def over_seeds(differences: Sequence[float]) -> list[float] | None:
    """Return the interval of Student's t of a mean over seeds; None for fewer than two.

    The seeds are the sample here: with three of them it is wide, 2.5 standard deviations to each side.
    """
    if len(differences) < 2:
        return None
    half = t_quantile(CONFIDENCE, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return [round(fmean(differences) - half, 6), round(fmean(differences) + half, 6)]


def differences(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return by how much the arm with two tries is better, from the rows' values of each seed.

    Args:
        one: Of each seed a value for each row, of the arm with one try.
        two: The same of the arm with two, by the same seeds.
    """
    by_seed = [_paired(first, second) for first, second in zip(one, two, strict=True)]
    together = _paired(mean_of(one), mean_of(two))
    return {
        "mean": round(together.mean, 6),
        "interval_over_rows": interval_json(together),
        "p_over_rows": float(f"{together.p:.3g}"),
        "by_seed": [{"mean": round(each.mean, 6), "interval": interval_json(each)} for each in by_seed],
        "interval_over_seeds": over_seeds([each.mean for each in by_seed]),
    }


def accuracy(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the accuracy of an arm, with its interval over rows, from the rows' values of each seed."""
    found = estimate(mean_of(values), len(values) * len(values[0]))
    assert isinstance(found, Estimate)
    return {
        "mean": round(found.mean, 6),
        "interval_over_rows": interval_json(found),
        "by_seed": [round(fmean(own), 6) for own in values],
    }


def compared(one: Sequence[Curve], two: Sequence[Curve], tokens: float) -> dict[str, Any]:
    """Return the comparison of both arms at an equal number of sampled tokens, by the names of `COMPARED`.

    Args:
        one: Of each seed the curve of the arm with one try.
        two: The same of the arm with two, by the same seeds.
        tokens: The number of sampled tokens, which every curve reaches.
    """
    found: dict[str, Any] = {}
    for name, answers in COMPARED.items():
        at_end, until = (
            [[of(curve, tokens, answer) for curve in arm] for arm, answer in zip((one, two), answers, strict=True)]
            for of in (values_at, values_until)
        )
        found[name] = {
            "one": accuracy(at_end[0]),
            "two": accuracy(at_end[1]),
            "difference": differences(*at_end),
            "difference_over_the_run": differences(*until),
        }
    return found


def picture(one: Sequence[Curve], two: Sequence[Curve], tokens: float, path: Path) -> None:
    """Draw both arms' curves over sampled tokens as an SVG file: thick ones the means, thin ones the seeds.

    Args:
        one: Of each seed the curve of the arm with one try.
        two: The same of the arm with two.
        tokens: Where the curves end.
        path: The file.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "reflection"  # the same curves give the same file
    import matplotlib.pyplot as plt

    grid = [tokens * at / _PICTURE_POINTS for at in range(_PICTURE_POINTS + 1)]
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: tuple[tuple[Sequence[Curve], Answer, str, str, str], ...] = (
        (one, "first", "tab:blue", "-", "one try: its answer"),
        (two, "final", "tab:orange", "-", "two tries: the final answer"),
        (two, "first", "tab:orange", "--", "two tries: the first answer"),
    )
    for curves, answer, colour, style, label in lines:
        own = [[fmean(values_at(curve, at, answer)) for at in grid] for curve in curves]
        if style == "-":
            for values in own:
                axes.plot(grid, values, color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(grid, mean_of(own), color=colour, linestyle=style, linewidth=2, label=label)
    axes.set(xlabel="tokens sampled for training", ylabel="held-out accuracy", xlim=(0, tokens), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def _paired(one: Sequence[float], two: Sequence[float]) -> PairedDifference:
    found = paired(one, two)
    assert found is not None, "there are held-out rows"
    return found
