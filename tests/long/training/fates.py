"""Each conversation that began in real runs has one fate, and the counts are those of the metrics.

    python -m benchmarks.fates [--short] [--worlds NAME …] [--steps 6] [--seed 0] [--out FOLDER]

Each world is one run of `verl-multiturn run quickstart --smoke` on the CPU, with records:

    sync              a tool whose author's mistake raises in some conversations
    sync_cut          over-sampling, and a worker that is killed
    colocate_reroll   slow calls, so that late groups are begun anew, and the mistake
    colocate_drop     slow calls, so that groups are evicted, and over-sampling
    separate_reroll   slow calls, so that late groups are begun anew, and a worker that is killed
    separate_drop     slow calls, so that groups are evicted, and the mistake

`--short` runs `sync`, `colocate_reroll` and `separate_drop` with 4 steps. The last line is a JSON object:

- `begun`: conversations that began; `fates`: how many of them have each fate, over all worlds;
- `wrong`: contradictions: a conversation without a fate, with two, or with one that nothing confirms; a group or a
  conversation that the metrics count otherwise. 0 if all is well; each is printed before;
- `missing`: fates that a world should have brought about and did not, by world;
- `worlds`: the same by world, with `seconds`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quickstart_runs import ROOT, processes_of, start
from tests.long.training.fates_count import compare

_OURS = "++actor_rollout_ref.rollout.custom.multiturn"
_WORKER = ("ray::MultiTurnWorker",)
_LOOK_S = 0.5
_SHOWN = 10
_KILLED_AFTER = 2
"""Steps after which the worker is killed."""


@dataclass(frozen=True)
class World:
    """One run.

    Attributes:
        mode: Trainer mode.
        brings: Fates that it should bring about.
        mistakes: Share of conversations in which the tool raises.
        median_s: Median seconds of a call.
        strategy: `staleness_strategy`; None: that of the mode's file.
        over_sample_rate: `rollout.over_sample_rate`.
        kills: Whether a worker is killed.
    """

    mode: str
    brings: tuple[str, ...]
    mistakes: float = 0.0
    median_s: float = 0.01
    strategy: str | None = None
    over_sample_rate: float = 0.0
    kills: bool = False

    def words(self, tools: Path) -> list[str]:
        """Return the words of the command.

        Args:
            tools: The tool YAML.
        """
        words = [
            "--smoke",
            f"recipe.tools={tools}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
            "trainer.save_freq=-1",
            "actor_rollout_ref.rollout.agent.num_workers=2",
        ]
        if self.strategy is not None:
            words.append(f"{_OURS}.staleness_strategy={self.strategy}")
        if self.over_sample_rate:
            words.append(f"actor_rollout_ref.rollout.over_sample_rate={self.over_sample_rate}")
        return words


WORLDS = {
    "sync": World("sync", ("trained", "raised"), mistakes=0.03),
    "sync_cut": World("sync", ("trained", "cut", "lost"), median_s=1.0, over_sample_rate=0.25, kills=True),
    "colocate_reroll": World(
        "colocate_async", ("trained", "rerolled", "raised", "failed"), 0.01, median_s=8.0, strategy="reroll"
    ),
    "colocate_drop": World(
        "colocate_async", ("trained", "evicted", "cut"), median_s=6.0, strategy="drop", over_sample_rate=0.25
    ),
    "separate_reroll": World(
        "separate_async", ("trained", "rerolled", "lost"), median_s=8.0, strategy="reroll", kills=True
    ),
    "separate_drop": World(
        "separate_async", ("trained", "evicted", "raised", "failed"), 0.01, median_s=6.0, strategy="drop"
    ),
}
SHORT = ("sync", "colocate_reroll", "separate_drop")


def run_all(names: Sequence[str], steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run worlds one after another, print errors and the figures of each, and return those of all.

    Args:
        names: Keys of `WORLDS`.
        steps: Steps of each run.
        seed: Seed of the runs.
        out: Folder of the runs.
    """
    results = {}
    for name in names:
        results[name] = run(WORLDS[name], steps, seed, out / name)
        print(json.dumps({"world": name, **results[name]}), flush=True)
    return summary(results)


def run(world: World, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run a world, and return its figures."""
    out.mkdir(parents=True, exist_ok=True)
    tools = out / "tools.yaml"
    entry = yaml.safe_load((ROOT / "tool_configs" / "calculator.yaml").read_text())["tools"][0]
    entry["class_name"] = "tests.long.training.mistaken_calculator.MistakenCalculator"
    entry["config"] = {"mistakes": world.mistakes, "median_s": world.median_s}
    entry["limits"] = {**entry.get("limits", {}), "timeout_s": 60}
    tools.write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    began = time.monotonic()
    with start(world.mode, steps, seed, out / "run", *world.words(tools)) as running:
        if world.kills:
            _kill_worker(running, out / "run")
        running.wait()
    if running.returncode:
        raise SystemExit(f"the run failed with exit status {running.returncode}: see {out / 'run' / 'train.log'}")
    return judge(world, out / "run", round(time.monotonic() - began))


def judge(world: World, out: Path, seconds: int) -> dict[str, Any]:
    """Return the figures of a run that is over.

    Args:
        world: The world.
        out: The run's folder.
        seconds: How long it took.
    """
    found = compare(out, cuts_known=not world.kills)
    for sentence in found["wrong"][:_SHOWN]:
        print(sentence)
    missing = [fate for fate in world.brings if not found["fates"].get(fate)]
    return {**found, "wrong": len(found["wrong"]), "missing": missing, "seconds": seconds}


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last line's object from the figures of the worlds."""
    fates: Counter[str] = Counter()
    for found in results.values():
        fates.update(found["fates"])
    return {
        "begun": sum(found["begun"] for found in results.values()),
        "fates": dict(fates),
        "wrong": sum(found["wrong"] for found in results.values()),
        "missing": {name: found["missing"] for name, found in results.items() if found["missing"]},
        "worlds": dict(results),
    }


def _kill_worker(running: subprocess.Popen[bytes], out: Path) -> None:
    """Kill a worker after some steps, while conversations are under way."""
    while running.poll() is None:
        time.sleep(_LOOK_S)
        metrics = out / "metrics.jsonl"
        trained = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        found = processes_of(running, _WORKER)
        if trained >= _KILLED_AFTER and found:
            os.kill(min(process.pid for process in found), signal.SIGKILL)
            return
