"""How much sooner is a batch complete with over-sampling, and what does it do to rewards and lengths?

    python -m benchmarks.oversample [--batches 8] [--scale 0.2] [--seed 0]

The time is the one from the submission of a batch until all of its groups are complete, that is the length of a
synchronous step's generation. A batch has 16 prompts with 8 samples each. With `over_sample_rate=0.25`, 11 samples of
each prompt begin, and the first 8 valid ones stay. The samples 0 to 7 are the same with and without it.

The worker, the agent loop and the tools' lifecycle are the real ones; see `oversample_world.py`. Scripted are:

- the tool: each call takes a lognormal time with a median of 1 s and σ = 1.2, at most 30 s. The seed, the row, the
  sample and the call's number fix it;
- the model: 100 tokens a second, whatever else it samples. So the samples that are cut cost no time of others. On an
  engine that is full they do;
- all times are multiplied by `--scale`.

Two worlds say what slowness has to do with reward and length. Each sample has a hardness h, normally distributed, half
of whose variance the samples of a prompt share.

- `coupled`: a hard conversation makes more calls (3 + 1.5 h, rounded, between 1 and 8), hence is longer and slower,
  and its answer is right with the probability Φ(-h): 0.5 on average.
- `independent`: each conversation makes 3 calls, each generation takes 0.5 s, and neither the length of the turns nor
  a right answer has anything to do with the time.

`length` is the number of sampled tokens. The biases are means over the samples that stayed, minus means over all that
began, as if each of them had run to its end. The last line is one JSON object; its biases are those of `coupled`.
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

from benchmarks.oversample_world import Sample, Script, ScriptedWorker, kept
from benchmarks.turn_cost import MODEL
from verl_multiturn.rollout.oversampling import samples_to_start

PROMPTS, SAMPLES, RATE = 16, 8, 0.25
SIGMA, LONGEST_S = 1.2, 30.0
TOKENS_PER_S = 100.0
TURN_S = 0.5
CALLS, CALLS_PER_H, MOST_CALLS = 3, 1.5, 8
FILLERS = 4
WORLDS = ("coupled", "independent")


class World(Script):
    """Conversations with a long-tailed tool.

    Args:
        coupled: whether hardness makes a conversation slow and wrong.
        seed: seed of everything that is drawn.
        scale: factor of all times.
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
        """Return how often each turn says the filler; in the world `independent` the lengths differ only by it."""
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
    """What was measured in one world, with one rate."""

    seconds: list[float]
    """Time of each batch."""
    stayed: list[Sample]
    cut: int
    cut_s: float


async def measure(world: World, tokenizer: Any, batches: int, rate: float) -> Measured:
    """Run the batches of a world, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        worker = ScriptedWorker(world, tokenizer, Path(folder), n=SAMPLES, over_sample_rate=rate)
        await worker.run_groups([0])  # builds what conversations share
        worker.rows.clear()
        await worker.take_cut()
        seconds = []
        for batch in range(batches):
            started = time.perf_counter()
            await worker.run_groups(range(batch * PROMPTS, (batch + 1) * PROMPTS))
            seconds.append(time.perf_counter() - started)
        cut, cut_s = await worker.take_cut()
    stayed = kept(list(worker.rows))
    assert len(set(stayed)) == batches * PROMPTS * SAMPLES, "a group has another number of rows than it should"
    return Measured(seconds, stayed, cut, cut_s)


def sampled_tokens(world: World, tokenizer: Any, samples: list[Sample]) -> list[int]:
    """Return the number of sampled tokens of conversations that run to their end."""
    from benchmarks.oversample_world import CALL, FILLER, LAST

    @cache
    def length(text: str) -> int:
        return len(tokenizer.encode(text))

    found = []
    for sample in samples:
        filler = FILLER * world.fillers(sample)
        found.append(sum(length(filler + CALL % call) for call in range(world.calls(sample))) + length(filler + LAST))
    return found


def compare(name: str, tokenizer: Any, batches: int, seed: int, scale: float) -> dict[str, float]:
    """Run a world with and without over-sampling, and return the figures."""
    coupled = name == "coupled"
    without = asyncio.run(measure(World(coupled, seed, scale), tokenizer, batches, 0.0))
    world = World(coupled, seed, scale)
    with_it = asyncio.run(measure(world, tokenizer, batches, RATE))
    begun = [(row, number) for row in range(batches * PROMPTS) for number in range(samples_to_start(SAMPLES, RATE))]
    assert with_it.cut == len(begun) - len(with_it.stayed)
    rewards = [statistics.fmean(map(world.reward, samples)) for samples in (with_it.stayed, begun)]
    lengths = [statistics.fmean(sampled_tokens(world, tokenizer, samples)) for samples in (with_it.stayed, begun)]
    return {
        "seconds_without": statistics.fmean(without.seconds) / scale,
        "seconds_with": statistics.fmean(with_it.seconds) / scale,
        "step_time_ratio": sum(with_it.seconds) / sum(without.seconds),
        "reward_all": rewards[1],
        "reward_bias": rewards[0] - rewards[1],
        "length_all": lengths[1],
        "length_bias": lengths[0] - lengths[1],
        "cut_samples": with_it.cut / batches,
        "cut_seconds": with_it.cut_s / scale / batches,
    }


def main() -> None:
    """Measure both worlds, and print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=8, help="batches in each of the four runs")
    parser.add_argument("--scale", type=float, default=0.2, help="factor of all times")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = {name: compare(name, tokenizer, options.batches, options.seed, options.scale) for name in WORLDS}
    table = Table("", *WORLDS, title=f"{PROMPTS} prompts × {SAMPLES} samples, over_sample_rate={RATE}, per batch")
    for key in found["coupled"]:
        table.add_row(key, *(f"{found[name][key]:.3f}" for name in WORLDS))
    Console().print(table)
    keys = {"step_time_ratio": 3, "reward_bias": 4, "length_bias": 1}
    print(json.dumps({key: round(found["coupled"][key], digits) for key, digits in keys.items()}))


if __name__ == "__main__":
    main()
