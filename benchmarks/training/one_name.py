"""`rollout.name=sglang_async` is verl's `sglang` with our servers: accepted settings, running classes, the result.

    python -m benchmarks.one_name [--parts composed batch training gpu] [--steps 20] [--seed 0] [--out FOLDER]

- `composed`: whole GPU configurations are checked by our start-up check and by verl's, and verl's registries are read
  for the classes of their training workers and servers: LoRA, LoRA with a bound on the age of tokens, weights sent as
  changes, and verl's own name. Nothing is started.
- `batch`: one step of the quickstart with one prompt under both names, on the CPU. SGLang's sampler has one stream of
  random numbers for all requests of its batch, so that which request gets which depends on when they come, and prompts
  come in an order of chance. So the engine samples one request at a time here, of one prompt and worker, without a
  cache. Compared are all columns of all rows of the first batch and of the validation before it (greedy), bit by bit,
  whatever their order: prompts, sampled tokens, masks, log-probabilities, weight versions.
- `training`: the quickstart under both names, `--steps` steps each. In both parts the classes of all processes are read
  at the checkpoint.
- `gpu`: with adapters, on a machine with a GPU: after five steps the engine's log-probabilities of its tokens are
  compared with those of the adapted and of the base model, computed from the checkpoint without verl and SGLang.

On the CPU platform the training worker's rollout is the platform's under both names, which sends weights by value.

The last line is one JSON object.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.quickstart_runs import ROOT, arguments, folder, start

NAMES = ("sglang_async", "sglang")
PARTS = ("composed", "batch", "training", "gpu")
_ROLLOUT = "actor_rollout_ref.rollout"
_VERLS_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"
_OURS = "verl_multiturn.verl_bridge"
OUR_CLASSES = {
    "replica": f"{_OURS}.servers.replica.AsyncSGLangReplica",
    "server": f"{_OURS}.servers.server.AsyncSGLangServer",
    "rollout": f"{_OURS}.loops.spmd.AsyncSGLangRollout",
}
VERLS_CLASSES = {
    "replica": f"{_VERLS_SERVER}.SGLangReplica",
    "server": f"{_VERLS_SERVER}.SGLangHttpServer",
    "rollout": "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter",
}
_IN_A_RUN = {
    "trainer": f"{_OURS}.trainer.trainers.MultiTurnSync",
    "rollout": "verl_multiturn.cpu.rollout.CpuAsyncSGLangRollout",
}
RUN_CLASSES = {
    "sglang_async": {**OUR_CLASSES, **_IN_A_RUN, "client": f"{_OURS}.servers.client.RolloutClient"},
    "sglang": {**VERLS_CLASSES, **_IN_A_RUN, "client": "verl.workers.rollout.llm_server.LLMServerClient"},
}
"""Classes of a run's processes on the CPU platform, by `rollout.name`."""
_ONE_BY_ONE = (
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    f"++{_ROLLOUT}.agent.num_workers=1",
    f"++{_ROLLOUT}.engine_kwargs.sglang.max_running_requests=1",
    f"++{_ROLLOUT}.engine_kwargs.sglang.disable_radix_cache=True",
)
_AS_THEY_COME = [f"+{_ROLLOUT}.custom.multiturn.cache.lead_ms=0", f"+{_ROLLOUT}.custom.multiturn.cache.full=null"]
"""With our servers no sibling goes ahead, and none waits for room: verl's send all turns in their order."""
_ASKED = "trainer.checkpoint_callback_class=benchmarks.one_name_classes.Classes"
_COLUMNS = ("prompt_length", "ids", "mask", "logprobs", "versions", "turn_ids", "sources", "stop_reason")


def cases() -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Return the configurations that are composed, by name: options of `plan_run`, and the classes that must run."""
    bound, delta = (
        f"++{_ROLLOUT}.custom.multiturn.max_staleness=1",
        f"{_ROLLOUT}.checkpoint_engine.backend=delta_sharded",
    )
    return {
        "lora": ({"variants": ["lora"]}, OUR_CLASSES),
        "lora_bound": ({"variants": ["lora"], "mode": "colocate_async", "overrides": [bound]}, OUR_CLASSES),
        "delta": ({"variants": ["async"], "overrides": [delta]}, OUR_CLASSES),
        "verls_own": ({"overrides": [f"{_ROLLOUT}.name=sglang"]}, VERLS_CLASSES),
    }


def composed() -> dict[str, str]:
    """Return for each case `ok`, or its error."""
    os.environ["VERL_PLATFORM"] = "nvidia"  # before verl is imported: this process is one on a GPU
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RAY_LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", DISABLE_WORKER_INIT="1")
    if importlib.util.find_spec("sgl_kernel") is None:  # SGLang imports its kernels for GPUs
        sys.path.append(str(ROOT / "verl_multiturn" / "cpu" / "stand_ins"))
    from tests.long.training.recipe_configs import BOX, judge
    from verl_multiturn.runs.compose import compose_run
    from verl_multiturn.runs.plan import plan_run

    verdicts = {}
    for name, (options, expected) in cases().items():
        config = compose_run(
            plan_run("gsm8k_multiturn", **{**options, "overrides": [*BOX, *options.get("overrides", [])]})
        )
        try:
            judge(config)
            wrong = differences(made_from(config), expected)
        except Exception as error:  # of any check: the verdict
            wrong = [f"{type(error).__name__}: {error}"]
        verdicts[name] = "; ".join(wrong) or "ok"
        print(f"{name}: {verdicts[name]}", flush=True)
    return verdicts


def made_from(config: Any) -> dict[str, list[str]]:
    """Make the objects that verl's workers and its manager make of a config, and return the classes.

    Raises:
        NotImplementedError: verl's worker of the servers apart from the trainer refuses the checkpoint engine.
    """
    from verl.checkpoint_engine.base import CheckpointEngineWorker
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    model: Any = SimpleNamespace(lora_rank=config.actor_rollout_ref.model.lora_rank, lora={}, get=lambda *_: None)
    replica = get_rollout_replica_class(rollout.name)(0, config.actor_rollout_ref.rollout, model, 8)
    adapter = get_rollout_class(rollout.name, rollout.mode)(config=rollout, model_config=model, device_mesh=None)
    try:
        CheckpointEngineWorker(rollout, model, server_adapter=adapter)
    except NotImplementedError:
        raise
    except Exception as error:  # behind verl's check: its engines for GPUs cannot be made here
        print(f"  behind verl's check of the checkpoint engine: {type(error).__name__}: {error}")
    made = {"replica": replica, "server": replica.server_class.__ray_actor_class__, "rollout": adapter}
    kinds = {name: found if isinstance(found, type) else type(found) for name, found in made.items()}
    return {name: [f"{kind.__module__}.{kind.__qualname__}"] for name, kind in kinds.items()}


def differences(found: Mapping[str, list[str]], expected: Mapping[str, str]) -> list[str]:
    """Return a sentence for each process whose classes are not the one expected."""
    return [
        f"{process}: {found.get(process, [])} in the place of {name}"
        for process, name in expected.items()
        if found.get(process) != [name]
    ]


def run(name: str, steps: int, seed: int, out: Path, *words: str) -> list[str]:
    """Run the quickstart under a name, and return the errors in the classes of its processes."""
    with start("sync", steps, seed, out, f"{_ROLLOUT}.name={name}", _ASKED, *words) as running:
        if running.wait():
            raise SystemExit(f"the run under the name {name} failed with exit status {running.returncode}")
    return [
        f"{name}: {wrong}" for wrong in differences(json.loads((out / "classes.json").read_text()), RUN_CLASSES[name])
    ]


def batch(seed: int, out: Path) -> dict[str, Any]:
    """Return whether the first batch, and the greedy validation before it, are the same under both names."""
    wrong, digests = [], []
    for name in NAMES:
        words = [
            *_ONE_BY_ONE,
            "trainer.save_freq=1",
            "trainer.test_freq=1",
            *(_AS_THEY_COME if name == NAMES[0] else ()),
        ]
        wrong += run(name, 1, seed, out / name, "--smoke", *words)
        records = list(read(out / name))
        sampled = [record for record in records if not record["validation"] and record["step"] == 1]
        first = min(record["step"] for record in records if record["validation"])
        greedy = [record for record in records if record["validation"] and record["step"] == first]
        digests.append(
            (len(sampled), digest(sampled), digest(sampled, ("prompt_length", "ids", "mask")), digest(greedy))
        )
        print(f"{name}: {len(sampled)} sampled rows, {len(greedy)} greedy ones, digests {digests[-1][1:]}", flush=True)
    one, other = digests
    return {
        "rows": one[0],
        "same_first_batch": one[:2] == other[:2],
        "same_first_tokens": one[2] == other[2],
        "same_first_validation": one[3] == other[3],
        "classes_wrong": wrong,
    }


def read(out: Path) -> Iterable[dict[str, Any]]:
    """Yield the records of a run's conversations, each with the columns of its row."""
    from verl_multiturn.records.read.records import read_records
    from verl_multiturn.records.rows import columns

    for record in read_records(out / "records"):
        (row,) = record["rows"]
        yield {**record, **columns(row), "prompt_length": row["prompt_length"]}


def digest(records: Iterable[Mapping[str, Any]], columns: Iterable[str] = _COLUMNS) -> str:
    """Return a digest of columns of records, whatever their order; floats count with all their bits."""
    rows = sorted(json.dumps([record[column] for column in columns]) for record in records)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def training(steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Return accuracy and violations of the quickstart under both names."""
    wrong, validation, violations = [], {}, {}
    for name in NAMES:
        wrong += run(name, steps, seed, out / name, f"trainer.save_freq={steps}")
        summary = json.loads((out / name / "summary.json").read_text())
        validation[name], violations[name] = summary["val_acc_after"], summary["certificate_violations"]
    return {"validation": validation, "violations": violations, "classes_wrong": wrong}


def main() -> int:
    """Run the parts, and print the figures; return 1 when one is not as it must be."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    out = folder(given.out, "one_name")
    found: dict[str, Any] = {}
    if "batch" in given.parts:
        found["batch"] = batch(given.seed, out / "batch")
    if "training" in given.parts:
        found["training"] = training(given.steps, given.seed, out / "training")
    if "gpu" in given.parts:
        found["gpu"] = on_gpu(given.seed, out / "gpu")
    if "composed" in given.parts:  # last: it makes this process one on a GPU
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            found["composed"] = composed()
    print(json.dumps(found))
    return 0 if is_well(found) else 1


def on_gpu(seed: int, out: Path) -> Any:
    """Return the differences of log-probabilities with adapters; `not run` on a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return "not run"
    from benchmarks.one_name_gpu import compare_adapters

    return compare_adapters(seed, out)


def is_well(found: Mapping[str, Any]) -> bool:
    """Return whether all figures are right; parts that were not run count as well."""
    one, trained, gpu = (found.get(part, {}) for part in ("batch", "training", "gpu"))
    return (
        all(verdict == "ok" for verdict in found.get("composed", {}).values())
        and not one.get("classes_wrong")
        and not trained.get("classes_wrong")
        and all(one.get(key, True) for key in ("same_first_batch", "same_first_validation"))
        and all(accuracy >= 0.97 for accuracy in trained.get("validation", {}).values())
        and not any(trained.get("violations", {}).values())
        and (gpu in ({}, "not run") or gpu["adapted"] <= 2e-3 < gpu["base"])
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
