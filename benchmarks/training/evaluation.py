"""Does `eval` repeat a trainer's own validation token by token, and does nothing that is killed change its table?

    python -m benchmarks.evaluation [--run DIR] [--parts same cases kills] [--kills 20] [--engine URL] [--out DIR]

- **same** (`--run`): a finished run of the quickstart. `eval DIR` must have the ids of its last validation, row by row,
  in at most 1.1 times its seconds, and no Ray. SGLang must be ready in 60 s.
- **cases**: three short validations of verl's trainer (`trainer.val_only`): context windows, so that a conversation has
  several rows (frozen_lake), a simulated user (ask_first), an agent behind the endpoint (proxy_quickstart); and `eval`
  of the same.
- **kills**: an evaluation of repair's model, right in some and wrong in others, 16 rows × 4, greedy, is killed
  (SIGKILL) at random moments and begun again, until it has ended. Each row and sample must have one conversation that
  counts, and the table must be that of one that was never killed. Of what they had started (SGLang among it) no process
  may remain.

The programs are forked from this process, which has imported verl, so that a start takes seconds. The records of every
part are verified. Exit status 1: something of this does not hold. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
KILLED = "repair"
"""Recipe of the evaluation that is killed."""
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "window": (
        "frozen_lake",
        (
            "+actor_rollout_ref.rollout.custom.multiturn.context={mode: window, turns: 2}",
            "algorithm.adv_estimator=mt_grpo",
        ),
    ),
    "interaction": ("ask_first", ()),
    "agent": ("proxy_quickstart", ()),
}
"""Recipe and overrides of each case."""
_ROWS = 16


def warm() -> None:
    """Import the modules of an evaluation, before this process forks."""
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401

    import verl_multiturn.cli.eval
    import verl_multiturn.cli.main
    import verl_multiturn.verl_bridge.offline.evaluate.command  # noqa: F401


def begin(words: Sequence[str], log: Path) -> int:
    """Fork a `verl-multiturn`, and return its process id; its output goes to a file."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        from verl_multiturn.cli.main import app

        app([*words], standalone_mode=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        import ray

        print(f"\nRAY {ray.is_initialized()}", flush=True)
        os._exit(status)


def ended(pid: int) -> int:
    """Wait for a process, and return its exit status; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(words: Sequence[str], log: Path) -> dict[str, Any]:
    """Run a `verl-multiturn eval` to its end, and return its last line with `ready_s` and whether it used Ray."""
    if status := ended(begin(words, log)):
        raise SystemExit(f"eval ended with status {status}; its output is {log}")
    lines = log.read_text(errors="replace").splitlines()
    last = next(line for line in reversed(lines) if line.startswith("{"))
    ready = [float(line.split()[2]) for line in lines if line.startswith("ready after")]
    return {**json.loads(last), "ready_s": ready[-1] if ready else None, "ray": lines[-1] == "RAY True"}


def tokens_of(records: Path, last_validation: bool) -> dict[str, list[Any]]:
    """Return the ids of each conversation's rows, by its data row and its number.

    Args:
        records: A folder of records.
        last_validation: Whether only the conversations of the last validation are wanted.
    """
    from verl_multiturn.records.read.records import read_records

    found = [record for record in read_records(records) if record["valid"]]
    if last_validation:
        found = [record for record in found if record["validation"]]
        step = max(record["step"] for record in found)
        found = [record for record in found if record["step"] == step]
    return {
        json.dumps([record["sample"], record["number"]], sort_keys=True): [row["ids"] for row in record["rows"]]
        for record in found
    }


def seconds_of(records: Path, last_validation: bool) -> float:
    """Return the seconds from the first conversation's beginning to the last one's end."""
    from verl_multiturn.records.read.records import read_records

    found = [record for record in read_records(records) if record["validation"] or not last_validation]
    step = max(record["step"] for record in found)
    times = [(record["began"], record["ended"]) for record in found if record["step"] == step]
    return max(end for _, end in times) - min(begin for begin, _ in times)


def verified(folder: Path) -> int:
    """Return the number of violations that `verify` finds in a folder's records."""
    shown = subprocess.run(
        [sys.executable, "-m", "verl_multiturn.cli", "verify", str(folder)], capture_output=True, text=True, cwd=ROOT
    )
    return int(json.loads(shown.stdout.splitlines()[-1])["violations"])


def compared(run_folder: Path, evaluation: Path) -> dict[str, Any]:
    """Compare an evaluation with a run's last validation, row by row."""
    theirs, ours = tokens_of(run_folder / "records", True), tokens_of(evaluation / "records", False)
    same = sum(ours.get(name) == ids for name, ids in theirs.items())
    rows = Counter(len(ids) for ids in ours.values())
    return {
        "conversations": len(theirs),
        "same": same,
        "evaluated": len(ours),
        "rows_of_a_conversation": max(rows, default=0),
        "violations": verified(evaluation),
    }


def same(run_folder: Path, out: Path) -> dict[str, Any]:
    """Evaluate a finished run's model, and compare it with the run's last validation."""
    folder = out / "same"
    told = run(["eval", str(run_folder), "--recipe", "quickstart", "--out", str(folder), "--trust"], out / "same.log")
    theirs, ours = seconds_of(run_folder / "records", True), seconds_of(folder / "records", False)
    return {
        **compared(run_folder, folder),
        "ready_s": told["ready_s"],
        "ray": told["ray"],
        "validation_s": round(theirs, 2),
        "evaluation_s": round(ours, 2),
    }


def case(name: str, out: Path) -> dict[str, Any]:
    """Validate by verl's trainer, evaluate the same, and compare."""
    recipe, changes = CASES[name]
    trained, folder = out / f"{name}-run", out / name
    words = [*changes, f"data.val_max_samples={_ROWS}"]
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", recipe, "--out", str(trained)]
    with (out / f"{name}-run.log").open("wb") as log:
        subprocess.run([*command, "trainer.val_only=True", *words], cwd=ROOT, stdout=log, stderr=log, check=False)
    asked = ["eval", str(model_of(recipe)), "--recipe", recipe, "--out", str(folder)]
    asked += [part for word in words for part in ("--set", word)]
    told = run([*asked, "--rows", str(trained / "data" / "test.parquet")], out / f"{name}.log")
    return {**compared(trained, folder), "ray": told["ray"]}


def model_of(recipe: str) -> Path:
    """Return the folder of the model that a recipe's training begins with."""
    return ROOT / "recipes" / ("quickstart" if recipe == "proxy_quickstart" else recipe) / "model"


def kill(pid: int) -> list[psutil.Process]:
    """Kill a process, and return those that it had started."""
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    return children


def killed(kills: int, seed: int, out: Path, engine: str) -> dict[str, Any]:
    """Kill an evaluation again and again, and compare it with one that was never killed."""
    draw, words = random.Random(seed), ["eval", str(model_of(KILLED)), "--recipe", KILLED, "--samples", "4"]
    words += ["--set", f"data.val_max_samples={_ROWS}", "--engine", engine]
    whole, torn = out / "whole", out / "torn"
    told = run([*words, "--out", str(whole)], out / "whole.log")
    most_s = seconds_of(whole / "records", False)  # a kill comes within the time that all conversations take
    pid = begin([*words, "--out", str(torn)], out / "torn.log")
    while not list((torn / "records").glob("*.jsonl.gz")):
        time.sleep(0.2)
    children = kill(pid)
    count, states = 1, []
    while count < kills:
        starts = len(list((torn / "records").glob("run-*.json")))
        pid, found = begin([*words, "--out", str(torn)], out / "torn.log"), (0, 0)
        while len(list((torn / "records").glob("run-*.json"))) == starts and not found[0]:
            found = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        until = time.monotonic() + draw.uniform(0.0, most_s)
        while time.monotonic() < until and not found[0]:
            found = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        if found[0]:  # it has ended: begin anew
            states.append(judged(torn, whole))
            torn = out / f"torn-{len(states)}"
            continue
        children += kill(pid)
        count += 1
    again = run([*words, "--out", str(torn)], out / "torn.log")
    states.append(judged(torn, whole))
    _, left = psutil.wait_procs(children, timeout=60)
    return {
        "kills": kills,
        "evaluations": len(states),
        "left_processes": len(left),
        "tables_equal": all(state["equal"] for state in states),
        "violations": sum(state["violations"] for state in states),
        "avg": [told["avg"], again["avg"]],
    }


def judged(torn: Path, whole: Path) -> dict[str, Any]:
    """Return whether an evaluation that was killed has the figures of one that was not."""
    from verl_multiturn.evaluation.results import read_results

    rows = {
        folder: [
            (row.number, [(each.number, each.score) for each in row.samples]) for row in read_results(folder).shown
        ]
        for folder in (torn, whole)
    }
    return {"equal": rows[torn] == rows[whole], "violations": verified(torn)}


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run of the quickstart")
    parser.add_argument("--parts", nargs="+", choices=("same", "cases", "kills"), default=("same", "cases", "kills"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="sglang", help="of the part kills: sglang, or the address of one that runs")
    parser.add_argument("--out", type=Path, help="folder of the evaluations; a temporary one by default")
    args = parser.parse_args()
    out = (args.out or Path(tempfile.mkdtemp(prefix="evaluation-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    warm()
    found: dict[str, Any] = {"seed": args.seed}
    good = True
    if "same" in args.parts and args.run is not None:
        found["same"] = told = same(args.run.absolute(), out)
        good &= told["same"] == told["conversations"] > 0 and not told["violations"] and not told["ray"]
    for name in args.cases if "cases" in args.parts else ():
        found[name] = told = case(name, out)
        good &= told["same"] == told["conversations"] > 0 and not told["violations"] and not told["ray"]
        good &= name != "window" or told["rows_of_a_conversation"] > 1
    if "kills" in args.parts:
        found["kills"] = told = killed(args.kills, args.seed, out, args.engine)
        good &= told["tables_equal"] and not told["violations"] and not told["left_processes"]
    print(json.dumps({**found, "passed": good}))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
