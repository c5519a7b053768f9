"""How much sooner is a batch complete with over-sampling, and what does it do to rewards and lengths?

    python -m benchmarks.oversample [--batches 4] [--scale 0.5] [--seed 0]

The time is the one from the submission of a batch until all of its groups are complete, that is the length of a
synchronous step's generation. A batch has 16 prompts with 8 samples each. With `over_sample_rate=0.25`, 11 samples of
each prompt begin, and the first 8 valid ones stay. The samples 0 to 7 are the same with and without it.

The worker, the agent loop and the tools' lifecycle are the real ones; see `oversample_world.py`. Scripted are:

- the tool: each call takes a lognormal time with a median of 1 s and σ = 1.2, at most 30 s. The seed, the row, the
  sample and the call's number fix it;
- the model: 100 tokens a second, whatever else it samples. So the samples that are cut cost no time of others. On an
  engine that is full they do;
- all times are multiplied by `--scale`.

Two worlds relate slowness to reward and length. Each sample has a hardness h, normally distributed, half of whose
variance the samples of a prompt share.

- `coupled`: a hard conversation makes more calls (3 + 1.5 h, rounded, between 1 and 8), hence is longer and slower,
  and its answer is right with the probability Φ(-h): 0.5 on average.
- `independent`: each conversation makes 3 calls, each generation takes 0.5 s, and neither the length of the turns nor
  a right answer has anything to do with the time.

`length` is the number of sampled tokens. The biases are means over the samples that stayed, minus means over all that
began, as if each of them had run to its end.

The time of our own code, some 1 s for a batch without over-sampling, counts too; the larger the scale, the less it
matters. The columns `drawn` have the figures of the drawn times alone, of 50 batches. The last line is one JSON object
with the measured figures of `coupled`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.oversample_world import CALL, FILLER, LAST, Sample, Script, ScriptedWorker, kept
from tests.support.rollout_config import MODEL
from verl_multiturn.rollout.groups.oversampling import samples_to_start

PROMPTS, SAMPLES, RATE = 16, 8, 0.25
SIGMA, LONGEST_S = 1.2, 30.0
TOKENS_PER_S = 100.0
TURN_S = 0.5
CALLS, CALLS_PER_H, MOST_CALLS = 3, 1.5, 8
FILLERS = 4
WORLDS = ("coupled", "independent")
DRAWN = 50
"""Batches of the figures that follow from the drawn times alone."""


class World(Script):
    """Conversations with a long-tailed tool.

    Args:
        coupled: Whether hardness makes a conversation slow and wrong.
        seed: Seed of everything that is drawn.
        scale: Factor of all times.
    """

    def __init__(self, coupled: bool, seed: int, scale: float) -> None:
        super().__init__()
        self._coupled = coupled
        self._seed = seed
        self._scale = scale
        self._normal = cache(self._draw)

    def _draw(self, what: str, *where: int) -> float:
        return float(np.random.default_rng([self._seed, *what.encode(), *where]).standard_normal())

    def _hardness(self, sample: Sample) -> float:
        return math.sqrt(0.5) * (self._normal("prompt", sample[0]) + self._normal("sample", *sample))

    def calls(self, sample: Sample) -> int:
        """Return the number of calls of a conversation."""
        if not self._coupled:
            return CALLS
        return min(MOST_CALLS, max(1, round(CALLS + CALLS_PER_H * self._hardness(sample))))

    def fillers(self, sample: Sample) -> int:
        """Return how often each turn has the filler; in the world `independent` the lengths differ only by it."""
        return FILLERS if self._coupled else max(1, round(FILLERS + 1.5 * self._hardness(sample)))

    def reward(self, sample: Sample) -> float:
        """Return 1 for a right answer, 0 for a wrong one."""
        h = self._hardness(sample) if self._coupled else self._normal("other", *sample)
        right = statistics.NormalDist().cdf(-h)
        return float(statistics.NormalDist().cdf(self._normal("luck", *sample)) < right)

    def latency_s(self, sample: Sample, call: int) -> float:
        """Return the seconds of a call, before they are scaled."""
        return min(LONGEST_S, math.exp(SIGMA * self._normal("latency", *sample, call)))

    async def generate(self, sample: Sample, tokens: int) -> None:
        """Take the time of a generation."""
        await asyncio.sleep(self._scale * tokens / TOKENS_PER_S if self._coupled else self._scale * TURN_S)

    async def use_tool(self, sample: Sample, call: int) -> None:
        """Take the time of a call."""
        await asyncio.sleep(self._scale * self.latency_s(sample, call))


@dataclass
class Measured:
    """The measurements of one world, with one rate."""

    seconds: list[float]
    """Time of each batch."""
    stayed: list[Sample]
    cut: int
    cut_s: float


async def measure(world: World, tokenizer: Any, batches: int, rate: float) -> Measured:
    """Run the batches of a world, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        worker = ScriptedWorker(world, tokenizer, Path(folder), n=SAMPLES, over_sample_rate=rate)
        await worker.run_groups([0])  # builds the parts that conversations share
        worker.rows.clear()
        await worker.news()
        seconds = []
        for batch in range(batches):
            started = time.perf_counter()
            await worker.run_groups(range(batch * PROMPTS, (batch + 1) * PROMPTS))
            seconds.append(time.perf_counter() - started)
        cut, cut_s, *_ = await worker.news()
    stayed = kept(list(worker.rows))
    assert len(set(stayed)) == batches * PROMPTS * SAMPLES, "a group has another number of rows than it should"
    return Measured(seconds, stayed, cut, cut_s)


class Lengths:
    """Numbers of sampled tokens of conversations that run to their end."""

    def __init__(self, world: World, tokenizer: Any) -> None:
        self._world = world
        self._count = cache(lambda text: len(tokenizer.encode(text)))

    def of(self, sample: Sample) -> int:
        """Return the number of sampled tokens of one conversation."""
        filler = FILLER * self._world.fillers(sample)
        calls = range(self._world.calls(sample))
        return sum(self._count(filler + CALL % call) for call in calls) + self._count(filler + LAST)


def figures(
    world: World, tokenizer: Any, batches: int, stayed: list[Sample], without_s: list[float], with_s: list[float]
) -> dict[str, float]:
    """Return times, ratio and biases, of the times of batches and of the samples that stayed."""
    begun = [(row, number) for row in range(batches * PROMPTS) for number in range(samples_to_start(SAMPLES, RATE))]
    length = Lengths(world, tokenizer).of
    rewards = [statistics.fmean(map(world.reward, samples)) for samples in (stayed, begun)]
    lengths = [statistics.fmean(map(length, samples)) for samples in (stayed, begun)]
    return {
        "seconds_without": statistics.fmean(without_s),
        "seconds_with": statistics.fmean(with_s),
        "step_time_ratio": sum(with_s) / sum(without_s),
        "reward_all": rewards[1],
        "reward_bias": rewards[0] - rewards[1],
        "length_all": lengths[1],
        "length_bias": lengths[0] - lengths[1],
    }


def measured(coupled: bool, tokenizer: Any, batches: int, seed: int, scale: float) -> dict[str, float]:
    """Run a world with and without over-sampling, and return the figures."""
    without = asyncio.run(measure(World(coupled, seed, scale), tokenizer, batches, 0.0))
    with_it = asyncio.run(measure(World(coupled, seed, scale), tokenizer, batches, RATE))
    times = [[seconds / scale for seconds in run.seconds] for run in (without, with_it)]
    found = figures(World(coupled, seed, scale), tokenizer, batches, with_it.stayed, *times)
    return {**found, "cut_samples": with_it.cut / batches, "cut_seconds": with_it.cut_s / scale / batches}


def drawn(coupled: bool, tokenizer: Any, batches: int, seed: int) -> dict[str, float]:
    """Return the figures that follow from the drawn times alone, as if nothing else took any time."""
    world = World(coupled, seed, 1.0)
    length = Lengths(world, tokenizer).of

    def seconds(sample: Sample) -> float:
        calls = world.calls(sample)
        generating = length(sample) / TOKENS_PER_S if coupled else TURN_S * (calls + 1)
        return generating + sum(world.latency_s(sample, call) for call in range(calls))

    stayed: list[Sample] = []
    times: list[list[float]] = [[], []]
    for batch in range(batches):
        ends: list[list[float]] = [[], []]
        for row in range(batch * PROMPTS, (batch + 1) * PROMPTS):
            began = [(row, number) for number in range(samples_to_start(SAMPLES, RATE))]
            first = sorted(began, key=seconds)[:SAMPLES]
            stayed += first
            ends[0].append(max(map(seconds, began[:SAMPLES])))
            ends[1].append(seconds(first[-1]))
        for each, end in zip(times, ends, strict=True):
            each.append(max(end))
    return figures(world, tokenizer, batches, stayed, *times)


def main() -> None:
    """Measure both worlds, and print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=4, help="batches in each of the four runs")
    parser.add_argument("--scale", type=float, default=0.5, help="factor of all times")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = {}
    for name in WORLDS:
        found[name] = measured(name == "coupled", tokenizer, options.batches, options.seed, options.scale)
        found[f"{name}, drawn"] = drawn(name == "coupled", tokenizer, DRAWN, options.seed)
    table = Table("", *found, title=f"{PROMPTS} prompts × {SAMPLES} samples, over_sample_rate={RATE}, per batch")
    for key in found["coupled"]:
        table.add_row(key, *(f"{each[key]:.3f}" if key in each else "" for each in found.values()))
    Console().print(table)
    keys = {"step_time_ratio": 3, "reward_bias": 4, "length_bias": 1}
    print(json.dumps({key: round(found["coupled"][key], digits) for key, digits in keys.items()}))


if __name__ == "__main__":
    main()
