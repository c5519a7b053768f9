"""CPU seconds of the commands that one waits for without a model, and the phases of a run's start.

    python -m benchmarks.start [--run outputs/quickstart] [--times 5] [--starts 3 [--before CHECKOUT]] [--out FILE]

Each command runs in a process of its own: once unmeasured, so that its bytecode is there, then `--times` times. The
figure is the median of user and system time, with the processes that it started. `show`, and the phases, are of the
folder of a finished run.

With `--starts`, the quickstart is started so often, for one step, and the figures are the medians of its phases
(`start_up.json`). With `--before`, it is started in another checkout as well, which has its own `.venv`, in turns with
this one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MOST = {"help": 0.6, "show": 1.0, "validate": 1.0, "check_tool": 1.0}
"""CPU seconds that a command should take at most."""
ROWS = 2_000
_ROOT = Path(__file__).parents[2]
_README = _ROOT / "README.md"
_TOOLS = "my_tools.yaml"


def fenced(text: str, begin: str) -> str:
    """Return the block of README.md that begins with a line, and ends where its fence does."""
    return text[text.index(f"{begin}\n") :].partition("```")[0]


def write_files(folder: Path) -> None:
    """Write the tool of README.md, its YAML, and rows that name it."""
    text = _README.read_text(encoding="utf-8")
    for name in ("my_tools.py", _TOOLS):
        (folder / name).write_text(fenced(text, f"# {name}"), encoding="utf-8")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Look up a{number}."}],
            "data_source": "openai/gsm8k",
            "agent_name": "multiturn_agent",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")


def commands(run: Path | None) -> dict[str, list[str]]:
    """Return the words of each command by its key; `show` only where there is a run."""
    words = {
        "help": ["--help"],
        "validate": ["validate", _TOOLS, "--dataset", "rows.parquet"],
        "check_tool": ["check-tool", _TOOLS],
    }
    return words if run is None else {**words, "show": ["show", str(run)]}


def cpu_seconds(words: Sequence[str], folder: Path) -> float:
    """Run a command that has to end well, and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "verl_multiturn.cli", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(run: Path | None, times: int) -> dict[str, float]:
    """Return the median of the CPU seconds of each command. They take turns, so that a busy minute is all of theirs."""
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        write_files(folder)
        found: dict[str, list[float]] = {key: [] for key in commands(run)}
        for number in range(times + 1):
            for key, words in commands(run).items():
                seconds = cpu_seconds(words, folder)
                if number:
                    found[key].append(seconds)
    return {key: round(statistics.median(each), 3) for key, each in found.items()}


def start_command(checkout: Path, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a checkout's quickstart for one step, and its environment."""
    python = sys.executable if checkout == _ROOT else str(checkout / ".venv" / "bin" / "python")
    command = ["bash", str(checkout / "recipes" / "quickstart" / "run.sh"), "--steps", "1", "--seed", "1"]
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return [*command, "--out", str(out)], environment


def phases_of_start(checkout: Path) -> dict[str, float]:
    """Start a checkout's quickstart for one step, and return the seconds of each phase of its start."""
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        out = Path(folder) / "run"
        command, environment = start_command(checkout, out)
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}")
        phases: dict[str, float] = json.loads((out / "start_up.json").read_text(encoding="utf-8"))["seconds"]
        return phases


def starts(times: int, before: Path | None) -> dict[str, Any]:
    """Start the quickstart here and, in turns, in another checkout; return the medians of the phases, and the ratio."""
    checkouts = {"here": _ROOT} if before is None else {"here": _ROOT, "before": before}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(times):
        for name, checkout in checkouts.items():
            found[name].append(phases_of_start(checkout))
            print(f"start {number + 1}, {name:6} {sum(found[name][-1].values()):6.1f} s: {found[name][-1]}", flush=True)
    medians = {name: median_phases(each) for name, each in found.items()}
    if before is None:
        return medians
    return {**medians, "ratio": round(sum(medians["here"].values()) / sum(medians["before"].values()), 3)}


def median_phases(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each phase over several starts."""
    return {phase: round(statistics.median(each[phase] for each in found), 2) for phase in found[0]}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, help="folder of a finished run of the quickstart")
    parser.add_argument("--times", type=int, default=5, help="how often each command is measured")
    parser.add_argument("--starts", type=int, default=0, help="how often the quickstart is started")
    parser.add_argument("--before", type=Path, help="another checkout, with its own .venv, to start in turns")
    parser.add_argument("--out", type=Path, help="file for the last line")
    options = parser.parse_args()
    run = None if options.run is None else options.run.resolve()
    cpu = measure(run, options.times)
    for key, seconds in cpu.items():
        print(f"{key:12} {seconds:6.3f} CPU s, of at most {MOST[key]}")
    phases: dict[str, Any] | None = None
    if run is not None:
        phases = json.loads((run / "start_up.json").read_text(encoding="utf-8"))["seconds"]
    told = {
        "cpu_s": cpu,
        "times": options.times,
        "beyond": [key for key, seconds in cpu.items() if seconds > MOST[key]],
        "start_up_seconds": phases,
        "starts": starts(options.starts, options.before and options.before.resolve()) if options.starts else None,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
