"""Step times of synchronous and asynchronous training, predicted on virtual time with our real replay buffer.

    python -m benchmarks.async_sim [--measured FILE] [--engine FILE] [--steps N]

1. `benchmarks.async_speed`: its step times are predicted from the seconds of a token, the training seconds of a step
   and the seconds of a weight transfer, which its runs measured apart (`results/async_speed.json`), from which
   conversations called, and from the tool's latencies, which are known. The time that the trainer waits is not an
   input. In `colocate_async` up to 320 conversations are interrupted at each step, after which they wait and are
   prefilled again. `sync` never shows that, so `benchmarks.engine_speed` measured it apart (`shared_engine`).
2. The 1.5B setting of AReaL (arXiv 2505.24298): 128 GPUs, three quarters of them generate, 512 prompts × 16 samples,
   a context of 32k tokens (`async_sim_setting.py` has the inputs). Published are 41.0 h for the synchronous system
   and 14.8 h for AReaL.
3. A step's rollout on a GPU whose cache is too small (`async_sim_cache.py` has the inputs), with and without the turns
   of the younger conversations held back.

The last line is a JSON object:

- `predicted`, `measured`: by mode, mean seconds of all steps, and of the second half of them;
- `error`: by mode, the largest of the two relative differences; the command fails when one is above 15 %;
- `settings`: hours and ratios of the 1.5B setting, predicted and published, for several shares of right answers;
- `cache`: by need, as a multiple of the cache, how many times as fast the rollout is with turns held back (`faster`),
  and the tokens that are read for it, as a share of those without (`read`). The command fails below 1.6 at 3.6.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import async_sim_cache
from benchmarks.async_sim_setting import hours
from benchmarks.async_speed import ETA, PROMPTS, SAMPLES
from benchmarks.async_training import NO_BOUND, Prompt, Setting, Training, Workload
from benchmarks.async_world import Draw, Engine
from benchmarks.quickstart_runs import MODES
from benchmarks.slow_calculator import latency_s

MEASURED = Path(__file__).resolve().parents[1] / "results" / "async_speed.json"
ENGINE = MEASURED.with_name("engine_speed.json")
MOST_WRONG = 0.15
CACHE = 16384
"""Tokens in the engine's cache (`max_total_tokens` of `verl_multiturn/cpu/defaults.py`)."""
MOST_SAMPLED = 128
"""Tokens that a conversation of the quickstart may sample."""
RESERVED = 0.7
"""Share of them that SGLang reserves at first (`SGLANG_INIT_NEW_TOKEN_RATIO`)."""
OWN_PROMPT = 3.5
"""Tokens of a prompt that are in no other one, per conversation: in 137 conversations 473 of them differ."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, and return 1 when a prediction is too far from the measured one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=MEASURED, help="file that async_speed --save wrote")
    parser.add_argument("--engine", type=Path, default=ENGINE, help="file that engine_speed --save wrote")
    parser.add_argument("--steps", type=int, default=40, help="steps of the 1.5B setting")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # the buffers warn about virtual waits
    runs = json.loads(given.measured.read_text())
    speed = json.loads(given.engine.read_text())
    predicted = {mode: means(step_times(mode, runs, speed)) for mode in runs}
    measured = {mode: means(run["step_s"]) for mode, run in runs.items()}
    error = {mode: round(largest_error(predicted[mode], measured[mode]), 3) for mode in runs}
    found = hours(given.steps)
    cache = async_sim_cache.faster()
    print(json.dumps({"predicted": predicted, "measured": measured, "error": error, "settings": found, "cache": cache}))
    too_slow = async_sim_cache.failures(cache)
    for said in too_slow:
        print(f"does not hold: {said}", file=sys.stderr)
    failed = [mode for mode, wrong in error.items() if wrong > MOST_WRONG]
    for mode in failed:
        print(f"does not hold: the prediction for {mode} is {error[mode]:.0%} off", file=sys.stderr)
    return int(bool(failed or too_slow))


def step_times(mode: str, runs: Mapping[str, Mapping[str, Any]], speed: Mapping[str, Any]) -> list[float]:
    """Return the predicted seconds of each step of a run of `async_speed`.

    Args:
        mode: The trainer's mode.
        runs: Measurements of the runs, by mode.
        speed: Measurements of `engine_speed`.
    """
    run = runs[mode]
    engine, pause_s = Engine(run["token_s"], run["token_s_each"]), 0.0
    if mode == MODES[1]:
        engine, pause_s = shared_engine(runs["sync"], speed)
    workload = Workload(
        slowness=lambda rng: 0.0,
        conversations=lambda prompt, rng: conversations(prompt, run),
        batch_size=PROMPTS,
        training_s=run["training_s"],
        sync_s=run["sync_s"] + pause_s,
        engine=engine,
    )
    steps = len(run["step_s"])
    training = Training(setting_of(mode, ETA, "reroll"), workload)
    ends = training.run(steps * PROMPTS).ends
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]


def shared_engine(sync: Mapping[str, float], speed: Mapping[str, Any]) -> tuple[Engine, float]:
    """Return the engine of `colocate_async`, and the seconds of a pause.

    `engine_speed` measured with nothing beside the engine, and at another time. So only the ratios of its figures are
    taken: to those of as many requests as `sync` has at once, whose seconds the run of `sync` measured.

    Most requests at once: SGLang reserves for a request 0.7 of the tokens that it may still sample. A request has, on
    average, sampled half a turn that calls; its prompt adds few tokens to those that are in the cache already.

    Args:
        sync: Measurements of the run of `sync`.
        speed: Measurements of `engine_speed`.
    """
    batch = PROMPTS * SAMPLES
    slower = (sync["decode_s"] + batch * sync["decode_s_each"]) / speed["step_s"][str(batch)]
    slower_filling = sync["prefill_s"] / speed["prefill_s"][str(batch)]
    sampled = sync["call_tokens"] / 2
    each = OWN_PROMPT + sampled + RESERVED * (MOST_SAMPLED - sampled)
    (step_s, step_s_each), (_, again_s_each) = speed["lines"]["step"], speed["lines"]["again"]
    engine = Engine(slower * step_s, slower * step_s_each, int(CACHE / each), slower_filling * again_s_each)
    pause_s, pause_s_each = speed["lines"]["pause"]
    # A step takes one batch out of those of the warm-up and its own; the others are interrupted.
    return engine, slower_filling * (pause_s + ETA * batch * pause_s_each)


def setting_of(mode: str, eta: int, policy: str) -> Setting:
    """Return how a trainer mode bounds the ages; `sync` is lockstep without a warm-up."""
    if mode == "sync":
        return Setting(NO_BOUND, 0, 0, mode="colocated")
    return Setting(policy, eta, eta, mode="separate" if mode == MODES[2] else "colocated")


def conversations(prompt: Prompt, run: Mapping[str, Any]) -> list[Draw]:
    """Return the conversations of a group: those of the run, which called as often, with the latencies of the tool.

    Args:
        prompt: The prompt, whose number is that of its row.
        run: Measurements of the run. A conversation that it did not end calls once.
    """
    call, answer = round(run["call_tokens"]), round(run["answer_tokens"])
    rows = run["calls"]
    known = rows[prompt.number] if prompt.number < len(rows) else [None] * SAMPLES
    calls = [1 if count is None else count for count in known]
    return [
        Draw([*[call] * count, answer], [latency_s(prompt.number, sample, number) for number in range(count)])
        for sample, count in enumerate(calls)
    ]


def means(step_s: Sequence[float]) -> dict[str, float]:
    """Return the mean seconds of all steps, and of the second half of them."""
    half = step_s[len(step_s) // 2 :]
    return {"all": round(sum(step_s) / len(step_s), 2), "second_half": round(sum(half) / len(half), 2)}


def largest_error(predicted: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Return the largest relative difference of two of `means`."""
    return max(abs(predicted[key] / measured[key] - 1) for key in measured)


if __name__ == "__main__":
    raise SystemExit(main())
