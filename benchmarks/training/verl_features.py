"""Features of verl's own that must work with ours: pass@k, checkpoint callbacks, the hybrid switch, routers, traces.

    python -m benchmarks.verl_features [--only pass_at_k callback hybrid trace] [--out FOLDER]

- `pass_at_k`: 1,000 random validations, whose `pass@k` is compared with a count of all choices of k samples;
- `callback`: a run whose `trainer.checkpoint_callback_class` raises after the first checkpoint, and one that goes on
  from that checkpoint;
- `hybrid`: six steps of `separate_async` whose conversations are so slow that the trainer lends its devices
  (`hybrid_rollout.enable_switch`), with half a warm-up batch and a router of `rollout.router_config_path`;
- `trace`: the figures of `benchmarks.trace_cost`.

The last line is a JSON object:

- `draws`, `pass_at_k_error`: the largest difference from the count;
- `callback_status` (not 0), `callback_complete` (whether its checkpoint is complete), `callback_resumed_steps`: steps
  that the second run made behind it;
- `hybrid_steps`, `hybrid_switches` (how often the trainer lent its devices between two steps), `hybrid_violations` (of
  the certificate), `hybrid_beyond` (by how much the oldest trained token is beyond the bound), `hybrid_servers` (the
  servers that the router named), `hybrid_routed` (requests for which it did) and `hybrid_cached` (the mean share of
  prompts that was in the engine's cache);
- `trace`: the fields of `trace_cost`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quickstart_runs import ROOT, folder, start
from verl_multiturn.models.checkpoints import checkpoint_folder, is_complete
from verl_multiturn.observe.pass_at_k import MOST_PROMPTS, passed_shares
from verl_multiturn.rows.reward_numbers import ScoreRange

_PARTS = "benchmarks.verl_feature_parts"
_HYBRID = "trainer.v1.separate_async.hybrid_rollout"
_QUICK = (
    "--smoke",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
)
_BOUND = 1
# Seconds of a call. A step of the smoke run trains for less, so that the trainer waits.
_CALL_S = 4.0
_MOST_SAMPLES = 8


def pass_at_k(draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Compare pass@k of random validations with a count."""
    rng = random.Random(seed)
    worst = 0.0
    for _ in range(draws):
        samples = [_draw_group(rng) for _ in range(rng.randint(1, 4))]
        stats = [
            {"group": f"u{number}", "valid": valid, "conversation": {"score": float(passed)}, "reported": {}}
            for number, group in enumerate(samples)
            for valid, passed in group
        ]
        counted = _counted([[passed for valid, passed in group if valid] for group in samples], samples)
        found = passed_shares(stats, ScoreRange())
        if found.keys() != counted.keys():
            return {"draws": draws, "pass_at_k_error": f"{sorted(found)} where {sorted(counted)} can be estimated"}
        worst = max([worst, *(abs(found[name] - value) for name, value in counted.items())])
    return {"draws": draws, "pass_at_k_error": worst}


def _draw_group(rng: random.Random) -> list[tuple[bool, bool]]:
    """Draw whether each sample of a prompt is valid, and whether it passes."""
    right, invalid = rng.choice([0.0, 0.1, 0.5, 1.0]), rng.choice([0.0, 0.0, 0.3])
    return [(rng.random() >= invalid, rng.random() < right) for _ in range(rng.randint(1, _MOST_SAMPLES))]


def _counted(valid: Sequence[Sequence[bool]], samples: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return pass@k by trying all choices of k samples of each prompt, and how many prompts have k."""
    most = max(map(len, samples))
    if most < 2:
        return {}
    found = {}
    for k in {1, 2, 4, 8, most}:
        shares = []
        for group in valid:
            choices = [any(choice) for choice in combinations(group, k)]
            shares += [sum(choices) / len(choices)] if choices else []
        if k <= most and len(shares) >= MOST_PROMPTS * len(valid):
            found[f"pass@{k}"] = sum(shares) / len(shares)
        if k <= most:
            found[f"pass@{k}/prompts"] = len(shares)
    return found


def callback(out: Path, seed: int = 0) -> dict[str, Any]:
    """Run a step whose checkpoint callback raises, and go on from its checkpoint."""
    run, log = out / "callback", out / "callback.log"
    out.mkdir(parents=True, exist_ok=True)
    named = f"trainer.checkpoint_callback_class={_PARTS}.RaisingCallback"
    with log.open("wb") as file, start("sync", 1, seed, run, *_QUICK, "trainer.save_freq=1", named, log=file) as first:
        status = first.wait()
    if "the callback fails after" not in log.read_text(errors="replace"):
        raise SystemExit(f"the run did not get as far as its callback; see {log}")
    complete = is_complete(checkpoint_folder(run / "checkpoints", 1))
    again = ("trainer.resume_mode=auto", "trainer.save_freq=1")
    with start("sync", 2, seed, run, *_QUICK, *again) as second:
        if second.wait():
            raise SystemExit(f"the run that goes on failed with exit status {second.returncode}")
    return {
        "callback_status": status,
        "callback_complete": complete,
        "callback_resumed_steps": len(_metrics(run)),
    }


def hybrid(out: Path, seed: int = 0, steps: int = 6, more: Sequence[str] = ()) -> dict[str, Any]:
    """Run `separate_async` with slow conversations, so that the trainer lends its devices.

    Args:
        out: Folder of the run.
        seed: The run's seed.
        steps: Number of steps.
        more: Further words of the command.
    """
    run, journal, router, tools = (out / name for name in ("hybrid", "routed.jsonl", "router.yaml", "tools.yaml"))
    out.mkdir(parents=True, exist_ok=True)
    router.write_text(json.dumps({"router_class": f"{_PARTS}.WritingRouter", "journal": str(journal)}))
    entry = yaml.safe_load((ROOT / "tool_configs" / "calculator.yaml").read_text())["tools"][0]
    entry |= {"class_name": f"{_PARTS}.SleepingCalculator", "config": {"seconds": _CALL_S}}
    tools.write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    words = [
        "actor_rollout_ref.hybrid_engine=True",
        f"{_HYBRID}.enable_switch=True",
        f"actor_rollout_ref.rollout.custom.multiturn.max_staleness={_BOUND}",
        "trainer.v1.separate_async.num_warmup_batches=0.5",
        f"actor_rollout_ref.rollout.router_config_path={router}",
        f"recipe.tools={tools}",
        "trainer.save_freq=-1",
    ]
    with start("separate_async", steps, seed, run, *_QUICK, *words, *more) as running:
        if running.wait():
            raise SystemExit(f"the hybrid run failed with exit status {running.returncode}")
    metrics = _metrics(run)
    routed = [json.loads(line)["server"] for line in journal.read_text().splitlines()]
    switched = "separate_async/decision/should_switch_to_rollout"
    return {
        "hybrid_steps": len(metrics),
        "hybrid_switches": int(sum(data.get(switched, 0) for data in metrics)),
        "hybrid_violations": int(sum(data["rollout/certificate/violations"] for data in metrics)),
        "hybrid_beyond": max(0, int(max(data["rollout/async/age/max"] for data in metrics)) - _BOUND),
        "hybrid_servers": len(set(routed)),
        "hybrid_routed": len(routed),
        "hybrid_cached": round(sum(data["rollout/cache/hit_share"] for data in metrics) / len(metrics), 3),
    }


def _metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _traced() -> dict[str, Any]:
    from benchmarks.trace_cost import measure

    return {"trace": measure()}


def main() -> None:
    """Measure the parts one after another, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("pass_at_k", "callback", "hybrid", "trace")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    given = parser.parse_args()
    out = folder(given.out, "verl_features")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "pass_at_k": lambda: pass_at_k(seed=given.seed),
        "callback": lambda: callback(out, given.seed),
        "hybrid": lambda: hybrid(out, given.seed),
        "trace": _traced,
    }
    line: dict[str, Any] = {}
    for name in given.only:
        line |= parts[name]()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
