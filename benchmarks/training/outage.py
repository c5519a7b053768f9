"""Effects of a tool's outage on a model: the quickstart, whose calculator's service goes down and comes back.

    python -m benchmarks.outage [--arms healthy pause off verl] [--seeds 0 1 2] [--short] [--mode sync] [--out FOLDER]

Each arm is one run of the quickstart on the CPU. The calculator is behind HTTP, and the reward is minus 0.1 for each
call, as where searches cost: with a reward that the outage makes equal for all, an outage could teach nothing. From the
end of step 5 on the service refuses connections, for 30 % of the time that the healthy run took.

    healthy     no outage
    pause       calls wait for the end of the outage: `custom.multiturn.outage.mode=pause`, the default
    mask        nothing waits, and what met the outage is not trained
    off         the model is told, and is trained on what it does then
    verl        verl's ToolAgentLoop

Further arms are single faults: `healthy_off` (as healthy, without a breaker), `single` (10 % of all calls fail),
`mistakes` (the tool always answers with a mistake of the model's), `hang`, `flap` (down and up every 5 s), `first_call`
(down when the run begins), `endless` (the run has to end, with a checkpoint), `resume` (that run is started again while
the service is still down, and goes on when it is back), `keeper` (the keeper is killed in the middle of the outage),
`oversample` (as `pause`, with a fourth of the samples cut), `garbage` (a user's own tool, whose service answers with
HTML of status 200 for 30 % of the run), and `addresses` (the same tool, whose config has `addresses: model`, at an
address that refuses connections for 30 % of the run). `--short` is one seed, smaller batches and 8 steps, with the
outage from step 3 on.

The last line is a JSON object. Each value is an object by arm, with one entry for each seed:

- `trained_behind_failure`: trained rows whose conversation saw a failure of the service;
- `groups_lost`: groups without a valid conversation;
- `accepted_after_s`: seconds from the recovery to the first call that was answered; null where there was no outage;
- `sampled_calls`: calls of a conversation in the last 5 steps;
- `accuracy`: of the validation after the last step;
- `steps_lost`, `steps_down`: steps without a trained token, and steps in which the service was down;
- `trips`: how often the breaker opened;
- `step_s`: median seconds of a step; `cost_healthy` is that of `healthy` over that of `healthy_off`, less 1;
- `status`, `saved`: exit status of the run, and the step of the checkpoint of an ended run; null: none;
- `violations`: of the certificate;
- `called_off`: conversations that ended by an outage, or were dropped for one.

`model_addresses_opened` is the number of trips and of conversations that were called off in the arm `addresses`, and
`garbage_trained_behind` that of rows trained behind garbage in the arm `garbage`; null where the arm was not run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import yaml

from benchmarks.outage_calculator import FAILURE, GARBAGE, Service, Way, serving
from benchmarks.quickstart_runs import MODES, ROOT, folder, start
from verl_multiturn.observe.metric_files import metric_files, read_metrics
from verl_multiturn.records.read.records import Records, read_records

MAIN = ("healthy", "pause", "off", "verl")
FAULTS = (
    "healthy_off",
    "mask",
    "single",
    "mistakes",
    "hang",
    "flap",
    "first_call",
    "endless",
    "resume",
    "keeper",
    "oversample",
    "garbage",
    "addresses",
)
ENDED = ("endless", "resume")
"""Arms whose outage ends the run."""
SHARE = 0.3
"""Part of the healthy run's time for which the service is down."""
FLAP_S = 5.0
STOP_S = 20.0
"""Seconds after which an outage ends the run, in the arm `endless`."""
_SETTINGS = "++actor_rollout_ref.rollout.custom.multiturn"
_LOOK_S = 0.05
_LAST = 5
_WAYS: dict[str, Way] = {
    "hang": "hangs",
    "mistakes": "raises",
    "first_call": "fails",
    "resume": "fails",
    "garbage": "garbage",
}
_OUTAGE_MODES = {"off": "off", "healthy_off": "off", "mask": "mask"}


@dataclass(frozen=True)
class Plan:
    """How long the runs are.

    Attributes:
        steps: Steps of a run.
        first: Step from which the service is down.
        prompts: Prompts of a step.
    """

    steps: int = 20
    first: int = 6
    prompts: int = 16


@dataclass
class Watched:
    """A run that has ended.

    Attributes:
        status: Its exit status.
        ends: When each step had ended (`time.time`).
        service: Its calculator's service.
    """

    status: int
    ends: list[float]
    service: Service


def main() -> None:
    """Run the arms one after another, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=(*MAIN, *FAULTS), default=MAIN)
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="0 1 2 by default; with --short 0")
    parser.add_argument("--mode", choices=MODES, default="sync", help="the trainer's mode")
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seconds", type=float, help="seconds of an outage; by default 30 %% of the healthy run")
    given = parser.parse_args()
    out = folder(given.out, "outage")
    plan = Plan(8, 3, 8) if given.short else Plan()
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for seed in given.seeds or ([0] if given.short else [0, 1, 2]):
        down_s = given.seconds
        for arm in given.arms:
            if down_s is None and arm not in ("healthy", "healthy_off", "single", "mistakes"):
                raise SystemExit(f"{arm}: how long is the outage? run the arm healthy before it, or give --seconds")
            found = run(arm, given.mode, plan, seed, down_s or 0.0, out / f"{arm}-{seed}")
            if arm == "healthy" and given.seconds is None:
                down_s = SHARE * found["run_s"]
            results[arm].append(found)
            print(json.dumps({"arm": arm, "seed": seed, **found}), flush=True)
    print(json.dumps(summary(results)))


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the last line's object from the results of each arm's runs."""
    fields = next(iter(results.values()))[0]
    found: dict[str, Any] = {
        field: {arm: [each[field] for each in runs] for arm, runs in results.items()} for field in fields
    }
    both = [results.get(arm) for arm in ("healthy", "healthy_off")]
    paused, off = (mean(each["step_s"] for each in runs) if runs else math.nan for runs in both)
    opened, garbage = results.get("addresses"), results.get("garbage")
    return found | {
        "cost_healthy": None if math.isnan(paused / off) else round(paused / off - 1, 4),
        "model_addresses_opened": sum(each["trips"] + each["called_off"] for each in opened) if opened else None,
        "garbage_trained_behind": sum(each["trained_behind_failure"] for each in garbage) if garbage else None,
    }


def run(arm: str, mode: str, plan: Plan, seed: int, down_s: float, out: Path) -> dict[str, Any]:
    """Run an arm, and return its figures.

    Args:
        arm: The arm.
        mode: verl's name of the trainer.
        plan: How long the run is.
        seed: The run's seed.
        down_s: Seconds for which the service is down.
        out: Folder of the run.
    """
    with serving(0.1 if arm == "single" else 0.0, seed) as service:
        words = settings(arm, plan, service.url, out)
        act = _FAULTS.get(arm, _outage)
        if arm == "first_call":
            service.take_down("fails")
        running = start(mode, plan.steps, seed, out / "run", *words, *_stop(arm))
        watched = watch(running, service, arm, act, plan, down_s, out / "run")
        if arm in ENDED and not watched.status:
            raise SystemExit(f"the arm {arm} did not end: see {out / 'run' / 'train.log'}")
        if arm == "resume":
            service.first_refused = None
            running = start(mode, plan.steps, seed, out / "run", *words, "trainer.resume_mode=auto")
            watched = watch(running, service, arm, _first_call, plan, down_s, out / "run", watched.ends)
    if watched.status and arm != "endless":
        raise SystemExit(f"the arm {arm} failed with exit status {watched.status}: see {out / 'run' / 'train.log'}")
    return measure(arm, watched, out / "run")


def settings(arm: str, plan: Plan, url: str, out: Path) -> list[str]:
    """Write the tool YAML of an arm, and return the settings of its run."""
    entry = yaml.safe_load((ROOT / "tool_configs" / "calculator.yaml").read_text())["tools"][0]
    entry["class_name"] = "benchmarks.outage_calculator.HttpCalculator"
    entry["config"] = {"url": url, "timeout_s": 10.0}
    if arm == "verl":
        entry["class_name"] = "benchmarks.outage_calculator_verl.VerlCalculator"
        entry["config"] = {"type": "native", "url": url}
    if arm in ("garbage", "addresses"):
        entry["class_name"] = "benchmarks.outage_calculator.ForeignCalculator"
        entry["config"] = {"url": url}
    if arm == "addresses":
        entry["limits"] = {"outage": {"addresses": "model"}}
    out.mkdir(parents=True, exist_ok=True)
    tools = out / "tools.yaml"
    tools.write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    found = [
        f"recipe.tools={tools}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('outage_reward.py')}",
        f"data.train_batch_size={plan.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={plan.prompts}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={plan.prompts * 8}",
        f"trainer.test_freq={plan.steps}",
        "trainer.val_before_train=False",
        f"trainer.rollout_data_dir={out / 'rows'}",
        f"trainer.save_freq={1000 if arm in ENDED else -1}",
    ]
    if arm == "verl":
        return [*found, "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"]
    if arm == "oversample":
        found.append("actor_rollout_ref.rollout.over_sample_rate=0.25")
    return [*found, f"{_SETTINGS}.outage.mode={_OUTAGE_MODES.get(arm, 'pause')}"]


def _stop(arm: str) -> list[str]:
    return [f"{_SETTINGS}.outage.stop_s={STOP_S}"] if arm in ENDED else []


def watch(
    started: subprocess.Popen[bytes],
    service: Service,
    arm: str,
    act: _Act,
    plan: Plan,
    down_s: float,
    out: Path,
    before: Sequence[float] = (),
) -> Watched:
    """Watch a run to its end, and take its service down meanwhile, as the arm requires.

    Args:
        started: The run.
        service: Its calculator's service.
        arm: The arm.
        act: Takes the service down, and brings it up again.
        plan: How long the run is.
        down_s: Seconds for which the service is down.
        out: Folder of the run.
        before: Ends of the steps that the folder has from before.
    """
    ends = list(before)
    with started as running:
        while running.poll() is None:
            time.sleep(_LOOK_S)
            lines = sum(file.read_bytes().count(b"\n") for file in metric_files(out))
            ends += [time.time()] * (lines - len(ends))
            if arm not in ("healthy", "healthy_off", "single") and len(ends) < plan.steps:
                act(service, arm, len(ends) >= plan.first - 1, down_s, running.pid)
    return Watched(running.returncode, ends, service)


def _is_down(service: Service) -> bool:
    return bool(service.down) and service.down[-1].end is None


def _outage(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    """Take the service down once it is due, for `down_s` seconds."""
    if due and not service.down:
        service.take_down(_WAYS.get(arm, "refuses"))
    elif _is_down(service) and time.time() > service.down[-1].begin + down_s:
        service.bring_up()


def _endless(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    if due and not service.down:
        service.take_down(_WAYS.get(arm, "refuses"))


def _mistakes(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    if not service.down:
        service.take_down("raises")


def _first_call(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    first = service.first_refused
    if _is_down(service) and first is not None and time.time() > first + down_s:
        service.bring_up()


def _flap(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    if not due or (service.down and time.time() > service.down[0].begin + down_s and not _is_down(service)):
        return
    if not service.down or (service.down[-1].end is not None and time.time() > service.down[-1].end + FLAP_S):
        service.take_down()
    elif _is_down(service) and time.time() > service.down[-1].begin + FLAP_S:
        service.bring_up()


def _keeper(service: Service, arm: str, due: bool, down_s: float, pid: int) -> None:
    _outage(service, arm, due, down_s, pid)
    if _is_down(service) and not service.killed and time.time() > service.down[-1].begin + down_s / 2:
        for process in psutil.Process(pid).children(recursive=True):
            if re.match(r"ray::\w*Keeper", " ".join(process.cmdline())):
                os.kill(process.pid, signal.SIGKILL)
                service.killed = True


_Act = Callable[[Service, str, bool, float, int], None]
_FAULTS: dict[str, _Act] = {
    "endless": _endless,
    "resume": _endless,
    "mistakes": _mistakes,
    "first_call": _first_call,
    "flap": _flap,
    "keeper": _keeper,
}


def measure(arm: str, watched: Watched, out: Path) -> dict[str, Any]:
    """Return the figures of a run from its metrics, its rows and its records."""
    entries = read_metrics(out)
    steps = {entry["step"]: entry["data"] for entry in entries if "timing_s/step" in entry["data"]}
    ends, down = watched.ends, watched.service.down
    spans = list(pairwise(ends))
    accuracy = [value for each in entries for key, value in each["data"].items() if key.startswith("val-core/")]
    rows = _rows_of_verl(out.parent / "rows") if arm == "verl" else _rows(out)
    behind, lost = _failures(rows, steps)
    calls = [mean(row["calls"] for row in rows[step]) for step in sorted(rows)[-_LAST:] if rows[step]]
    saved = out / "checkpoints" / "latest_checkpointed_iteration.txt"
    after = [each.accepted - each.end for each in down if each.accepted is not None and each.end is not None]
    return {
        "trained_behind_failure": behind,
        "groups_lost": lost,
        "accepted_after_s": round(max(after), 2) if after else None,
        "sampled_calls": round(mean(calls), 3) if calls else None,
        "accuracy": round(accuracy[-1], 3) if accuracy else None,
        "steps_lost": sum(data.get("rollout/skipped_updates", 0) > 0 for data in steps.values()),
        "steps_down": sum(
            any(each.begin < end and (each.end is None or each.end > begin) for each in down) for begin, end in spans
        ),
        "trips": sum(data.get("rollout/outage/trips", 0) for data in steps.values()),
        "step_s": round(median(data["timing_s/step"] for data in steps.values()), 3) if steps else None,
        "run_s": round((ends[-1] - ends[0]) * len(ends) / (len(ends) - 1), 1) if len(ends) > 1 else None,
        "down_s": round(sum((each.end or each.begin) - each.begin for each in down), 1),
        "status": watched.status,
        "saved": int(saved.read_text()) if saved.exists() else None,
        "called_off": sum(row.get("called_off", False) for own in rows.values() for row in own)
        + int(sum(data.get("rollout/outage/rows_left_out", 0) for data in steps.values())),
        "violations": sum(data.get("rollout/certificate/violations", 0) for data in steps.values()),
    }


def _rows(out: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the conversations of a run of ours from its records, by step.

    Those of a step that broke off are not counted: nothing of them was trained, and their prompts are drawn anew.
    """
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    taken = set(Records(out / "records").joined()["uid"].to_pylist())
    for record in read_records(out / "records"):
        if record["validation"] or record["uid"] not in taken:
            continue
        failed = any(FAILURE in call["text"] or GARBAGE in call["text"] for call in record["calls"])
        found[record["step"]].append(
            {
                "group": record["uid"],
                "valid": record["valid"],
                "called_off": record["stop_reason"] == "outage",
                "failed": failed,
                "calls": len(record["calls"]),
            }
        )
    return found


def _rows_of_verl(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the conversations of verl's loop from the rows that verl dumps, by step; verl knows no invalid ones."""
    found: dict[int, list[dict[str, Any]]] = {}
    for file in folder.glob("*.jsonl"):
        each = [json.loads(line) for line in file.read_text().splitlines()]
        found[int(file.stem)] = [
            {
                "group": row["uid"].rsplit("_", 2)[0],
                "valid": True,
                "failed": FAILURE in row["output"],
                "calls": row["output"].count("<tool_call>"),
            }
            for row in each
        ]
    return found


def _failures(
    rows: Mapping[int, Sequence[Mapping[str, Any]]], steps: Mapping[int, Mapping[str, float]]
) -> tuple[int, int]:
    """Return how many trained rows saw a failure, and how many groups had no valid conversation.

    A record says whether a conversation was invalid when it ended. Conversations that the trainer dropped later are
    known by number: they are among those that saw a failure, which the certificate has checked. In the asynchronous
    modes a step's rows may have begun in an earlier one, so the sums over all steps are compared.
    """
    behind = sum(row["valid"] and row["failed"] for own in rows.values() for row in own)
    behind -= int(sum(data.get("rollout/outage/rows_left_out", 0) for data in steps.values()))
    lost = 0
    for own in rows.values():
        groups: dict[str, bool] = defaultdict(bool)
        for row in own:
            groups[row["group"]] |= row["valid"]
        lost += sum(not valid for valid in groups.values())
    return behind, lost


if __name__ == "__main__":
    main()
