"""Groups without signal: the work that `custom.multiturn.filter` saves, and whether training stays the same.

    python -m benchmarks.filters [--short] [--parts simulated loss real] [--seeds 0 1 2] [--steps 20] [--out FOLDER]

Three parts. **simulated**: the real replay buffers, pools and checkpoint files train worlds on a TransferQueue in
memory, in each mode, synchronous and asynchronous, and are killed and resumed. **loss**: verl's own policy losses, of
batches in which rows have advantages of 0, with all rows and with those that `spared.py` leaves. **real**: the
quickstart on the CPU, once for each filter and seed; figures of the steps from 8 on. With `--short` the first two parts
are small, and the last one is one run of `difficulty` with 3 steps, which shows that it runs and nothing more.

The last line is a JSON object:

- `wrong`: groups that a plain count of their valid conversations would have treated otherwise; `in_vain`: steps that
  submitted another number of groups than they took and evicted; `twice`, `lost`: groups that were trained, skipped or
  evicted twice along the steps that count, or never; `unlike`: checkpoints after which pools or counts were others, or,
  in `sync`, after which the run ended with others than without the kill: all 0;
- `simulated_rollouts`: by filter, conversations for each trained group with a signal, ÷ the same without a filter;
- `simulated_rows`: by filter, different data rows for each trained group with a signal;
- `gradient`: largest difference of a gradient entry between all rows and the rows that stay, ÷ the largest entry;
- `rollouts`: of the real runs, by filter, conversations for each trained group with a signal, ÷ the same with `off`;
- `training`: seconds of old log-probabilities and update, by filter, ÷ the same with `off`;
- `accuracy`: of the last validation, by filter, the lowest of the seeds;
- `violations`: of the certificate.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from benchmarks.quickstart_runs import start
from tests.long.tokens.masked_gradient import AGGREGATIONS, Batch, make_batch
from tests.long.training.filters_world import World, play, play_killed
from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.settings import PROPORTIONAL
from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import TAUGHT, TRAINED, SkippedRows, thin

FILTERS = ("off", "skip", "refill", "difficulty")
FROM_STEP = 8
_TRAINING = ("timing_s/old_log_prob", "timing_s/update_actor")
_GROUPS, _GROUP = 16, 8  # of a step; conversations of a group


def simulated(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Play all worlds, with and without a kill, and return the figures."""
    faults: Counter[str] = Counter()
    rollouts: dict[str, list[float]] = {}
    rows: dict[str, list[float]] = {}
    for mode in FILTERS:
        for is_async in (False, True):
            for seed in seeds:
                plain = play(World(mode, is_async, seed, steps), steps)
                counts = plain.found.counts
                signals = counts["trained_signal"]
                rollouts.setdefault(mode, []).append(counts["conversations"] / signals)
                rows.setdefault(mode, []).append(len(plain.found.trained) / signals)
                faults.update({name: counts[name] for name in ("wrong", "in_vain")})
                for before in (steps // 4, steps // 2):
                    killed = World(mode, is_async, seed, steps)
                    with tempfile.TemporaryDirectory() as place:
                        faults.update(play_killed(killed, before, 3, steps, Path(place)))
                    if not is_async and killed.buffer.filter.state() != plain.buffer.filter.state():
                        faults["unlike"] += 1
        print(mode, dict(faults), flush=True)
    base = fmean(rollouts["off"])
    return {
        **{name: faults[name] for name in ("wrong", "in_vain", "twice", "lost", "unlike")},
        "simulated_rollouts": {mode: round(fmean(found) / base, 3) for mode, found in rollouts.items()},
        "simulated_rows": {mode: round(fmean(found), 3) for mode, found in rows.items()},
    }


class Columns:
    """Columns of rows in the place of TransferQueue."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        """Return columns of rows."""
        return list_of_dict_to_tensordict([{name: self.rows[int(key)][name] for name in select_fields} for key in keys])


def loss_gradient(batch: Batch, name: str, aggregation: str) -> torch.Tensor:
    """Return the gradient of the logits of a policy loss that is divided as verl's workers divide it."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=name)
    )
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=float(batch["mask"].sum()),
        global_batch_size=len(batch["mask"]),
        loss_scale_factor=64,
    )
    logits = batch["logits"].clone().requires_grad_()
    log_prob = logits.log_softmax(-1).gather(-1, batch["tokens"][..., None])[..., 0]
    loss, _ = POLICY_LOSS_REGISTRY[name](
        old_log_prob=batch["old_log_prob"],
        log_prob=log_prob,
        advantages=batch["advantages"],
        response_mask=batch["mask"].bool(),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=batch["rollout_is_weights"],
    )
    loss.backward()
    assert logits.grad is not None
    return logits.grad


def gradients(draws: int) -> float:
    """Return the largest difference of a gradient with all rows and with those that stay, ÷ its largest entry."""
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.compat import row_store

    worst = 0.0
    for draw in range(draws):
        parts = [make_batch(10 * draw + i) for i in range(4)]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        generator = torch.Generator().manual_seed(draw)
        taught = torch.rand(len(batch["mask"]), generator=generator) < 0.4
        taught &= batch["mask"].any(-1)
        taught[0] = True
        batch["advantages"] = batch["advantages"] * taught[:, None]
        rows = len(taught)
        thinned = thin([TAUGHT if each else TRAINED for each in taught.tolist()], rows, 1, 2)
        if thinned is None:
            continue
        kept = torch.tensor(thinned.kept)
        columns = Columns([{"loss_mask": mask} for mask in batch["mask"]])
        for name in PROPORTIONAL:
            for aggregation in AGGREGATIONS:
                actor = {"policy_loss": {"loss_mode": name}, "loss_agg_mode": aggregation}
                config = {"algorithm": {}, "actor_rollout_ref": {"actor": actor, "rollout": {"n": 2}}}
                spared = SkippedRows(OmegaConf.create(config))
                with mock.patch.object(row_store, "transfer_queue", columns):
                    (factor,) = spared._factors([str(i) for i in range(rows)], thinned, "train", rows, 1)
                part = {key: column[kept] for key, column in batch.items()}
                part["advantages"] = part["advantages"] * factor
                whole = loss_gradient(batch, name, aggregation)
                less = torch.zeros_like(whole)
                less[kept] = loss_gradient(part, name, aggregation)
                worst = max(worst, float((whole - less).abs().max() / whole.abs().max()))
    return worst


def real(filters: Sequence[str], seeds: Sequence[int], steps: int, out: Path) -> dict[str, Any]:
    """Run the quickstart with each filter and seed, and return the figures."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        for name in filters:
            found.setdefault(name, []).append(_run(name, seed, steps, out / f"{name}-{seed}"))
            print(json.dumps({"filter": name, "seed": seed, **found[name][-1]}), flush=True)
    mean = {name: {key: fmean(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}
    base = mean.get("off")
    relative = {
        field: {name: round(mean[name][field] / base[field], 3) if base else None for name in mean}
        for field in ("rollouts", "training")
    }
    accuracy = {name: min(run["accuracy"] for run in runs) for name, runs in found.items()}
    violations = sum(int(run["violations"]) for runs in found.values() for run in runs)
    return {**relative, "accuracy": accuracy, "violations": violations}


def _run(name: str, seed: int, steps: int, out: Path) -> dict[str, float]:
    words = [f"+{PATH}.filter={name}", "trainer.save_freq=-1", "trainer.val_before_train=False"]
    with start("sync", steps, seed, out, *words) as running:
        if running.wait():
            raise SystemExit(f"the run with filter={name} failed with exit status {running.returncode}: see {out}")
    lines = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return {**measure(lines, min(FROM_STEP, steps)), "violations": summary["certificate_violations"]}


def measure(steps: Sequence[dict[str, float]], first: int) -> dict[str, float]:
    """Return the figures of a run from the metrics of its steps.

    Args:
        steps: The metrics, in order; those of a validation before the first step may be among them.
        first: The first step that counts.
    """
    counted = [step for step in steps if step.get("training/global_step", 0) >= first]
    signals = sum(_GROUPS - step.get("rollout/groups_equal", _GROUPS) for step in counted)
    conversations = sum(step.get("rollout/filter/conversations", _GROUPS * _GROUP) for step in counted)
    accuracy = [value for step in steps for key, value in step.items() if key.startswith("val-core/")]
    return {
        "rollouts": conversations / max(1.0, signals),
        "training": sum(step.get(key, 0.0) for step in counted for key in _TRAINING),
        "accuracy": round(accuracy[-1], 3) if accuracy else 0.0,
    }


def faults_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that are wrong."""
    faults = {
        name: line[name] for name in ("wrong", "in_vain", "twice", "lost", "unlike", "violations") if line.get(name)
    }
    if line.get("gradient", 0.0) > 1e-5:
        faults["gradient"] = line["gradient"]
    return faults
