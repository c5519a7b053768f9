"""Reflection: does a second try in training pay, at equal sampled tokens?

    python -m benchmarks.reflection [--seeds 0 1 2] [--arms one two] [--tokens 60000] [--every 10] [--out FOLDER]

Two arms train the same start model on the same sums by GRPO, with the quickstart's settings and without its tool:

    one     the model has one try
    two     after a wrong answer the user calls it wrong, and no more, and the model has a second try

The reward is 1 for a right last answer, as in AReaL's example of multi-turn maths, whose conversations are trained as a
whole, too. A conversation with two tries samples up to twice the tokens, so the arms are compared by sampled tokens and
not by steps: a run is ended after the first validation behind `--tokens`, and each curve is read off at that number.
Held-out rows allow two tries in both arms, sampled at temperature 0.6, so that first and final answers of both are
known. `--every` is the number of steps between validations.

A start model is made first, the same for all runs (`reflection_start.py`). A run that has reached the tokens is not
done again, so the command goes on with the same `--out`. Beside the runs it writes `reflection.json` and
`reflection.svg`.

The last line is a JSON object:

- `tokens`, `rows`, `seeds`; `start`: the start model's figures;
- `compared`: an object for each of `answer` (one try's answer and two tries' final answer: the main one), `first`
  (first answers) and `final` (final answers, two tries for both), each with `one` and `two` (accuracy at `tokens`),
  `difference` (two less one, there) and `difference_over_the_run` (of the means from 0 to `tokens`).
  `interval_over_rows` is for these runs' models on all rows like these, `interval_over_seeds` for all runs like these.
  null where an arm is missing;
- `runs`: of each arm and seed its `curve` (sampled tokens, accuracy of first and of final answers), `steps`, `invalid`
  (conversations), `violations` of the certificate and `metrics_differ` (by how much the final accuracy differs from
  verl's own, at most).
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.quickstart_runs import folder, start
from benchmarks.reflection_curves import Point, compared, picture
from benchmarks.reflection_task import HELD_OUT
from verl_multiturn.observe.metric_files import read_metrics
from verl_multiturn.records.read.records import read_records

ARMS: Mapping[str, int] = {"one": 1, "two": 2}
"""Tries of a training row in each arm."""
TEMPERATURE = 0.6
"""Temperature of the validations, as in AReaL's example."""
MOST_STEPS = 1000
POINTS = "points.json"
_TASK = Path(__file__).with_name("reflection_task.py")
_USER = Path(__file__).with_name("reflection_user.yaml")
_ROLLOUT = "actor_rollout_ref.rollout"
_ACCURACY = "val-core/"
_LOOK_S = 1.0
_WRITTEN_S = 5.0
"""Seconds after which the records of a step are in their files."""


def main() -> None:
    """Make the start model, run the arms, and print and draw the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--tokens", type=int, default=60_000, help="sampled tokens of each run")
    parser.add_argument("--every", type=int, default=10, help="steps between validations")
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    given = parser.parse_args()
    from benchmarks.reflection_start import make_start  # imports torch, which `--help` and the tests need not

    out = folder(given.out, "reflection")
    figures = make_start(out / "start")
    runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for seed in given.seeds:
        for arm in given.arms:
            runs[arm][seed] = run(arm, seed, given.tokens, given.every, out)
    found = {
        "tokens": given.tokens,
        "rows": HELD_OUT,
        "seeds": given.seeds,
        "start": figures,
        "compared": None,
        "runs": {arm: {str(seed): shown(each) for seed, each in own.items()} for arm, own in runs.items()},
    }
    if len(runs) == len(ARMS):
        one, two = ([_curve(each) for each in runs[arm].values()] for arm in ARMS)
        found["compared"] = compared(one, two, given.tokens)
        picture(one, two, given.tokens, out / "reflection.svg")
    (out / "reflection.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def run(arm: str, seed: int, tokens: int, every: int, out: Path) -> dict[str, Any]:
    """Run an arm, unless it has run so far already, and return its points and figures.

    Args:
        arm: The arm.
        seed: The run's seed.
        tokens: Sampled tokens behind which it is ended.
        every: Steps between validations.
        out: Folder of all runs.

    Raises:
        SystemExit: The run failed.
    """
    own = out / f"{arm}-{seed}"
    if (own / POINTS).is_file():
        found: dict[str, Any] = json.loads((own / POINTS).read_text())
        if found["points"][-1][0] >= tokens:
            return found
    shutil.rmtree(own, ignore_errors=True)  # of a run that was broken off, or was shorter
    own.mkdir(parents=True)
    began = time.monotonic()
    with (own / "output.log").open("wb") as log:
        watch(start("sync", MOST_STEPS, seed, own / "run", *settings(arm, every, out), log=log), tokens, own / "run")
    found = measure(own / "run") | {"seconds": round(time.monotonic() - began, 1)}
    (own / POINTS).write_text(json.dumps(found) + "\n")
    print(json.dumps({"arm": arm, "seed": seed, **shown(found)}), flush=True)
    return found


def settings(arm: str, every: int, out: Path) -> list[str]:
    """Return the settings by which an arm's run differs from the quickstart."""
    return [
        "recipe.tools=null",
        f"recipe.prepare_data={_TASK}",
        f"+recipe.prepare.tries={ARMS[arm]}",
        f"actor_rollout_ref.model.path={out / 'start'}",
        f"++{_ROLLOUT}.custom.multiturn.interaction_config_path={_USER}",
        f"{_ROLLOUT}.val_kwargs.do_sample=True",
        f"{_ROLLOUT}.val_kwargs.temperature={TEMPERATURE}",
        f"trainer.test_freq={every}",
        "trainer.save_freq=-1",
    ]


def watch(running: subprocess.Popen[bytes], tokens: int, out: Path) -> None:
    """End a run after the first validation behind so many sampled tokens.

    The metrics count the trained tokens, which are at most the sampled ones; the records are counted afterwards.

    Args:
        running: The run.
        tokens: The number of tokens.
        out: Its folder.

    Raises:
        SystemExit: It ended by itself.
    """
    with running:
        while running.poll() is None:
            time.sleep(_LOOK_S)
            if is_far(read_metrics(out), tokens):
                time.sleep(_WRITTEN_S)
                running.send_signal(signal.SIGTERM)  # a shell's background processes ignore SIGINT
                running.wait()
                return
    raise SystemExit(f"the run ended before it had sampled {tokens} tokens; see {out / 'train.log'}")


def is_far(entries: Sequence[Mapping[str, Any]], tokens: int) -> bool:
    """Return whether a validation came after so many trained tokens.

    Args:
        entries: The run's metrics by step, as `read_metrics` returns them.
        tokens: The number of tokens.
    """
    trained = 0.0
    for entry in entries:
        trained += entry["data"].get("rollout/certificate/tokens", 0.0)
        if trained >= tokens and any(name.startswith(_ACCURACY) for name in entry["data"]):
            return True
    return False


def measure(out: Path) -> dict[str, Any]:
    """Return the points of a run and its figures, from its records and its metrics."""
    records = [record for record in read_records(out / "records") if record["status"] == "finished"]
    entries = read_metrics(out)
    accuracies = {
        entry["step"]: value
        for entry in entries
        for name, value in entry["data"].items()
        if name.startswith(_ACCURACY) and "/acc/" in name
    }
    points = [point for step, point in points_of(records).items() if step in accuracies]
    differ = [
        abs(fmean(point.final) - accuracies[step]) for step, point in points_of(records).items() if step in accuracies
    ]
    return {
        "points": points,
        "steps": max(accuracies),
        "invalid": sum(not record["valid"] for record in records),
        "violations": sum(entry["data"].get("rollout/certificate/violations", 0) for entry in entries),
        "metrics_differ": max(differ),
    }


def points_of(records: Sequence[Mapping[str, Any]]) -> dict[int, Point]:
    """Return the point of each validation that is whole, by its step.

    An answer is right where the user's reply to it has the reward 1. A turn that was cut has no reply, and is wrong.

    Args:
        records: The conversations of a run that ended.
    """
    sampled: dict[int, int] = defaultdict(int)
    right: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for record in records:
        step = record["step"]
        if record["validation"]:
            rewards = [reply["reward"] or 0.0 for reply in record["replies"]]
            first, final = (rewards[0], rewards[-1]) if len(rewards) == len(record["generations"]) else (0.0, 0.0)
            right[step][record["sample"]["index"]] = first, final
        else:
            sampled[step] += sum(generation["tokens"] for generation in record["generations"])
    found = {}
    for step, rows in sorted(right.items()):
        if len(rows) == HELD_OUT:
            first_R, final_R = ([rows[index][at] for index in range(HELD_OUT)] for at in (0, 1))
            found[step] = Point(sum(count for each, count in sampled.items() if each <= step), first_R, final_R)
    return found


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's figures for the last line: a point has the rows' means."""
    curve = [[tokens, round(fmean(first), 4), round(fmean(final), 4)] for tokens, first, final in found["points"]]
    return {"curve": curve, **{name: value for name, value in found.items() if name != "points"}}


def _curve(found: Mapping[str, Any]) -> list[Point]:
    return [Point(*point) for point in found["points"]]


if __name__ == "__main__":
    main()
