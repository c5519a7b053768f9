"""Price and bias of the ways to bound the age of trained tokens.

verl's real replay buffers and ours run on virtual time (`benchmarks.async_training`). A prompt has 8 conversations of 3
tool calls. The logarithm of a call's time is normal (median 0.5 s, sigma = 1.2); half of its variance is the prompt's,
half the call's own. The training of 16 prompts takes 6 s, in which the engine goes on.

    .venv/bin/python -m benchmarks.staleness                   # 88 runs of 10,000 groups
    .venv/bin/python -m benchmarks.staleness --variants        # of `reroll`: begin groups anew earlier, or more of them
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Any

from benchmarks.async_training import NO_BOUND, OURS, POLICIES, Prompt, Setting, Training, Workload
from benchmarks.async_world import Draw

GROUPS = 10_000
GROUP_SIZE, CALLS, TURN_TOKENS = 8, 3, 25
SIGMA, MEDIAN_S = 1.2, 0.5
HALF = SIGMA * math.sqrt(0.5)
_SLOW = NormalDist(0, HALF).inv_cdf(0.8)

Measured = dict[str, float]


def conversations(prompt: Prompt, rng: random.Random) -> list[Draw]:
    """Draw the conversations of a group."""
    draws = []
    for _ in range(GROUP_SIZE):
        calls_s = [MEDIAN_S * math.exp(prompt.slowness + rng.gauss(0, HALF)) for _ in range(CALLS)]
        draws.append(Draw([TURN_TOKENS] * (CALLS + 1), calls_s))
    return draws


WORKLOAD = Workload(slowness=lambda rng: rng.gauss(0, HALF), conversations=conversations)


def settings(etas: Sequence[int] = (0, 1, 2, 4)) -> list[Setting]:
    """Return all settings: the warm-up is one batch below eta, eta, and one above it."""
    return [
        Setting(policy, eta, warmup)
        for policy in POLICIES
        for eta in etas
        for warmup in (eta - 1, eta, eta + 1)
        if warmup >= 0
    ]


def measure(setting: Setting, groups: int) -> Measured:
    """Run one setting, and return its measurements."""
    training = Training(setting, WORKLOAD)
    result = training.run(groups)
    tokens = [tokens for prompt, tokens in result.by_prompt if prompt.slowness > _SLOW]
    return {
        "consumed": result.consumed,
        "over_age": result.over_age / result.tokens,
        "prompts_lost": result.lost,
        "duration_ratio": training.duration_ratio(),
        "seconds_per_step": result.seconds / result.steps,
        "masked": result.masked / (result.masked + result.tokens),
        "rerolled": result.rerolled,
        "slow_fifth": sum(tokens) / result.tokens,
        "max_age": result.max_age,
    }


def unkept(found: dict[Setting, Measured]) -> list[str]:
    """Return the claims of `docs/train/async.md` that do not hold."""
    failed = []
    for setting, measured in found.items():
        if setting.policy in OURS and measured["over_age"] > 0:
            failed.append(f"{setting}: trains tokens beyond the bound")
        if setting.policy in ("drop", "wait") and measured["masked"] > 0:
            failed.append(f"{setting}: leaves tokens to the mask")
        if setting.policy in ("mask", "reroll", "wait") and measured["prompts_lost"]:
            failed.append(f"{setting}: loses prompts")
    for policy, eta, most in ((NO_BOUND, 2, 1.1), ("wait", 1, 0.75)):
        ours, other = Setting("reroll", eta, eta), Setting(policy, eta, eta)
        if ours in found and other in found:
            ratio = found[ours]["seconds_per_step"] / found[other]["seconds_per_step"]
            print(f"reroll takes {ratio:.2f} times as long as {other.policy!r} at eta={eta} (at most {most})")
            if ratio > most:
                failed.append(f"{ours}: takes {ratio:.2f} times as long as {other.policy!r}")
    return failed


def show(setting: Setting, measured: Measured, name: str = "") -> None:
    """Print one line of the table."""
    share = measured["prompts_lost"] / (measured["prompts_lost"] + measured["consumed"])
    print(
        f"{name or str(setting):34} {measured['seconds_per_step']:6.2f} {measured['over_age']:8.1%} "
        f"{measured['max_age']:5.0f} {share:6.1%} {measured['masked']:7.1%} "
        f"{measured['rerolled'] / measured['consumed']:9.1%} {measured['duration_ratio']:9.2f} "
        f"{measured['slow_fifth']:6.1%}",
        flush=True,
    )


def heading() -> None:
    """Print the names of the table's columns."""
    print(
        "over age, masked: shares of tokens; lost: of prompts; rerolled: groups begun anew, per trained group;\n"
        "duration: mean tool time of trained tokens / of all draws; slow: share of the slowest fifth of the prompts in "
        "the trained tokens\n"
        f"{'':34} s/step over age   max   lost  masked  rerolled  duration   slow"
    )


def variants() -> Iterable[tuple[str, Setting]]:
    """Return the variants of `reroll`, each with its name."""
    for eta in (1, 2, 4):
        for mode in ("separate", "colocated"):
            for name, more in {
                "as it is": {},
                "finished too": {"finished_too": True},
                "early": {"early": True},
            }.items():
                yield f"{mode}, eta={eta}, {name}", Setting("reroll", eta, eta, mode=mode, **more)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the settings and print a table and the JSON line; return 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=GROUPS, help="groups that each run trains")
    parser.add_argument("--variants", action="store_true", help="compare variants of reroll")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # the buffers warn about virtual waits
    heading()
    if given.variants:
        for name, setting in variants():
            show(setting, measure(setting, given.groups), name)
        return 0
    found: dict[Setting, Measured] = {}
    for setting in settings():
        found[setting] = measure(setting, given.groups)
        show(setting, found[setting])
    failed = unkept(found)
    for line in failed:
        print(f"does not hold: {line}", file=sys.stderr)
    shown = ("consumed", "over_age", "prompts_lost", "duration_ratio", "seconds_per_step")
    summary: dict[str, Any] = {
        key: {str(setting): round(measured[key], 4) for setting, measured in found.items()} for key in shown
    }
    print(json.dumps(summary))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
