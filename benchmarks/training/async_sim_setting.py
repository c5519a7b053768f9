"""The 1.5B setting of AReaL (arXiv 2505.24298, section 7), from known figures of the model and the GPUs.

No input is chosen by the published hours. They are, with their sources:

- 128 GPUs; the synchronous system takes turns on all of them, AReaL generates on 96 and trains on 32; 512 prompts × 16
  samples a step, 250 steps, prompts up to 1,024 of 32,768 tokens, eta = 8 (the paper);
- the model: 28 layers, width 1,536, 2 key-value heads of 128, 1.54 B parameters in 16 bits (Qwen2.5-1.5B's config);
- the GPU: 989 TFLOP/s in 16 bits and 3.35 TB/s (H800 SXM's data sheet);
- lengths of answers: right ones have 6,395 tokens on average, wrong ones 20,346 (DeepScaleR's report on this model and
  AIME). The training set's share of right answers is not published: AIME's is 0.29, AMC's 0.63, so several are tried.

Assumed, and typical: an answer's length is lognormal within its kind (sigma = 0.6) and cut at the context; decoding
reads weights and key-value cache at 70 % of the bandwidth, and a step costs 2 ms more; training runs at 35 % of the
peak, with one forward pass more for the proximal policy; a weight transfer takes 5 s. Not simulated: prefill, also
after interruptions, uneven loads, the reward, and a cache that is full.

All is simulated at an eighth of the size, 64 prompts on 16 GPUs: the load of a GPU is the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any

from benchmarks.async_training import NO_BOUND, Prompt, Setting, Training, Workload
from benchmarks.async_world import Draw, Engine

PUBLISHED_H = {"sync": 41.0, "async": 14.8}
RIGHT_SHARES = (0.3, 0.5, 0.7)
GPUS, GENERATING, PROMPTS, SAMPLES, STEPS, ETA = 128, 96, 512, 16, 250, 8
SCALE = 8
PROMPT_TOKENS, MOST_TOKENS = 1024, 32768 - 1024
RIGHT_TOKENS, WRONG_TOKENS, SIGMA = 6395, 20346, 0.6
LAYERS, WIDTH, KV_WIDTH, PARAMETERS = 28, 1536, 256, 1.54e9
FLOPS, BYTES_PER_S = 989e12 * 0.35, 3.35e12 * 0.7
STEP_S, SYNC_S = 0.002, 5.0


def mean_cut(mu: float, sigma: float, most: float) -> float:
    """Return the mean of a lognormal length that is cut: E[min(X, most)]."""
    normal, at = NormalDist(), (math.log(most) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * normal.cdf(at - sigma) + most * (1 - normal.cdf(at))


@cache
def mu_of(mean: float, sigma: float = SIGMA, most: float = MOST_TOKENS) -> float:
    """Return the `mu` with which a lognormal length, cut at `most`, has this mean."""
    low, high = 0.0, 2 * math.log(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_cut(middle, sigma, most) < mean else (low, middle)
    return low


def lengths(right_share: float, count: int, rng: random.Random) -> list[int]:
    """Draw the tokens of answers."""
    mus = [mu_of(RIGHT_TOKENS), mu_of(WRONG_TOKENS)]
    drawn = [math.exp(rng.gauss(mus[rng.random() >= right_share], SIGMA)) for _ in range(count)]
    return [round(min(MOST_TOKENS, max(1.0, tokens))) for tokens in drawn]


def engine_of(gpus: float, drawn: Sequence[int]) -> Engine:
    """Return the speed of so many generating GPUs: each reads the weights, and its requests' key-value cache.

    The context of a running request is its mean over the time that it runs.
    """
    context = PROMPT_TOKENS / 2 + sum(tokens**2 for tokens in drawn) / (2 * sum(drawn))
    cache = 2 * LAYERS * KV_WIDTH * 2 * context
    return Engine(STEP_S + 2 * PARAMETERS / BYTES_PER_S, cache / BYTES_PER_S / gpus)


def training_s(gpus: float, drawn: Sequence[int]) -> float:
    """Return the seconds in which so many GPUs train answers: forward, backward, and one more forward pass."""
    flops = 0.0
    for tokens in drawn:
        whole = tokens + PROMPT_TOKENS / 2
        flops += 4 * (2 * PARAMETERS * whole + 2 * LAYERS * WIDTH * whole**2)
    return flops / (gpus * FLOPS)


def step_s(asynchronous: bool, right_share: float, steps: int) -> float:
    """Return the predicted seconds of a step.

    Args:
        asynchronous: Whether AReaL is meant, not the synchronous system.
        right_share: Share of right answers.
        steps: Steps that are simulated; the second half of them counts.
    """
    rng = random.Random(0)
    sample = lengths(right_share, 20_000, rng)
    generating, training = (GENERATING, GPUS - GENERATING) if asynchronous else (GPUS, GPUS)
    batch = [sample[i % len(sample)] for i in range(PROMPTS * SAMPLES)]

    def conversations(prompt: Prompt, rng: random.Random) -> list[Draw]:
        return [Draw([tokens], []) for tokens in lengths(right_share, SAMPLES, rng)]

    workload = Workload(
        slowness=lambda rng: 0.0,
        conversations=conversations,
        batch_size=PROMPTS // SCALE,
        training_s=training_s(training, batch),
        sync_s=SYNC_S,
        engine=engine_of(generating / SCALE, sample),
    )
    setting = Setting(NO_BOUND, ETA, ETA) if asynchronous else Setting(NO_BOUND, 0, 0, mode="colocated")
    ends = Training(setting, workload).run(steps * PROMPTS // SCALE).ends
    return (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2)


def hours(steps: int) -> dict[str, Any]:
    """Return hours of 250 steps and their ratio, predicted for each share of right answers, and published.

    Args:
        steps: Steps that are simulated; the second half of them counts.
    """
    found: dict[str, Any] = {}
    for share in RIGHT_SHARES:
        sync, apart = (STEPS * step_s(asynchronous, share, steps) / 3600 for asynchronous in (False, True))
        found[f"right={share}"] = {"sync": round(sync, 1), "async": round(apart, 1), "ratio": round(sync / apart, 2)}
    ratio = PUBLISHED_H["sync"] / PUBLISHED_H["async"]
    return found | {"published": {**PUBLISHED_H, "ratio": round(ratio, 2)}}
