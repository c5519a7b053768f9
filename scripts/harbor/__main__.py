"""Try the bridge to Harbor on made tasks, in workspaces and in containers of podman.

    python -m scripts.harbor [NAME…]     parts, as in PARTS; all by default

The last line is one JSON object: the outcome of each session, and the faults. The exit status is 1 if one is not as it
has to be, a completion is not accounted for, a record has violations, or something remains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from scripts.harbor.made_tasks import IMAGE, MISSING, make_image, make_task
from scripts.harbor.policies import CHEAT, COUNT, commands, keystrokes
from scripts.harbor.sessions import PYTHON, judge, play
from tests.support.template_play import template_of
from verl_multiturn.config import HarborSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.trials.runner import HarborRunner, check_harbor

OUTSIDE = "verl_multiturn.harnesses.harbor.mini_swe:MiniSweAgent"
_SOLVED, _CHEATED = commands(COUNT), commands(CHEAT)
_TERMINUS = {"record_terminal_session": False}
Reports = dict[str, Any]


def settings_of(environment: str, harness: str, **kwargs: Any) -> HarborSettings:
    """Return the bridge's settings for a harness in an environment."""
    return HarborSettings(harness=harness, harness_kwargs=kwargs, environment=environment)


async def references(environment: str, task: Path, reports: Reports) -> None:
    """Let the oracle solve a task, and no model."""

    async def one(harness: str, runner: HarborRunner) -> None:
        end = await judge(runner, task)
        reports[f"{environment}.{harness}"] = {"end": end.kind, "reward": end.result.reward, "problem": end.problem}

    runners = {harness: HarborRunner(settings_of(environment, harness), PYTHON) for harness in ("oracle", "nop")}
    try:
        await asyncio.gather(*(one(*each) for each in runners.items()))
    finally:  # a runner that is closed removes all containers of this process
        for runner in runners.values():
            await runner.aclose()


async def cheats(environment: str, base: str, folder: Path, reports: Reports) -> None:
    """Solve and cheat side by side, where verifiers have environments of their own, eight sessions at once."""
    task = make_task(folder, "count", base=base)
    crashing = make_task(folder, "crashing", base=base, tests="crashing")
    dying = make_task(folder, "dying", base=base, tests="dying")
    rows = [(task, _SOLVED), (task, _CHEATED), (crashing, _SOLVED), (dying, commands("echo die > /app/answer.txt"))]
    names = ["solved", "cheated", "crashing_verifier", "verifier_that_dies_of_it", *(f"at_once_{n}" for n in range(4))]
    rows += [(task, _SOLVED)] * 4
    ended = await play(template_of("qwen3"), settings_of(environment, OUTSIDE), rows)
    reports |= {f"{environment}.{name}": end for name, end in zip(names, ended, strict=True)}


async def refusals(folder: Path, reports: Reports) -> None:
    """Ask Harbor's Python of settings that cannot work."""
    wrong = {
        "no harness that Harbor": settings_of("workspace", "terminus-99"),
        "no environment that Harbor": settings_of("dockr", "nop"),
        "installs itself": settings_of("workspace", "mini-swe-agent"),
        "works in a terminal": settings_of("workspace", "terminus-2"),
        "does not work here": settings_of("daytona", "nop"),
    }
    for words, settings in wrong.items():
        try:
            check_harbor(settings, PYTHON)
            said = "nothing"
        except ConfigError as error:
            said = str(error)
        reports[f"refusals.{words.replace(' ', '_')}"] = {"refused": words in said, "problem": said[:300]}
    check_harbor(settings_of("workspace", OUTSIDE), PYTHON)


async def workspaces(folder: Path, reports: Reports) -> None:
    """Run the tasks in workspaces of the embedded sandbox."""
    await references("workspace", make_task(folder, "count", base="scratch"), reports)
    await cheats("workspace", "scratch", folder, reports)
    task = make_task(folder, "count", base="scratch")
    late = make_task(folder, "late", base="scratch", agent_s=60)
    rows = [(task, commands("kill -9 -1; sleep 1")), (late, commands("sleep 1000")), (task, _SOLVED)]
    ended = await play(template_of("qwen3"), settings_of("workspace", OUTSIDE, command_s=600), rows)
    names = ("workspace.ended_its_own", "workspace.late", "workspace.beside_them")
    reports |= dict(zip(names, ended, strict=True))


async def containers(folder: Path, reports: Reports) -> None:
    """Run the tasks in containers of podman; return the reason where it does not run them."""
    if (why := _no_podman()) is not None:
        reports["podman"] = {"skipped": why}
        return
    make_image()
    task = make_task(folder, "count", base=IMAGE)
    await references("podman", task, reports)
    await cheats("podman", IMAGE, folder, reports)
    qwen = template_of("qwen3")
    [played] = await play(qwen, settings_of("podman", "terminus-2", **_TERMINUS), [(task, keystrokes(COUNT))])
    reports["podman.terminus-2"] = played
    missing = make_task(folder, "missing", base=MISSING)
    rows = [(missing, _SOLVED), (task, commands(f"touch {_MARK}", COUNT, before=_kill)), (task, _SOLVED)]
    ended = await play(qwen, settings_of("podman", OUTSIDE), rows)
    reports |= dict(zip((f"podman.{name}" for name in ("missing_image", "killed", "beside_them")), ended, strict=True))


_MARK = "/app/to-be-killed"


def _kill(turn: int) -> None:
    """Kill, before the second turn, the container in which the first one made a mark."""
    if turn == 1:
        said = subprocess.run(
            ["podman", "ps", "--quiet"], capture_output=True, text=True, encoding="utf-8", errors="replace"
        ).stdout
        for container in said.split():
            if subprocess.run(["podman", "exec", container, "test", "-e", _MARK]).returncode == 0:
                subprocess.run(["podman", "kill", container], capture_output=True)


def _no_podman() -> str | None:
    """Return why podman runs no containers here; None if it does."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    done = subprocess.run(["podman", "info"], capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        return done.stderr.strip()[-300:]
    try:
        make_image()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return str(error)[:300]
    done = subprocess.run(
        ["podman", "run", "--rm", IMAGE, "true"], capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    return done.stderr.strip()[-300:] or "a container does not start" if done.returncode else None


PARTS: dict[str, Callable[[Path, Reports], Awaitable[None]]] = {
    "refusals": refusals,
    "workspace": workspaces,
    "podman": containers,
}
_INVALID = ("crashing_verifier", "missing_image", "killed")
_FAILED = ("verifier_that_dies_of_it", "ended_its_own", "late")
_NOTHING = ("cheated",)


def faults(reports: Reports) -> list[str]:
    """Return the faults."""
    found = []
    for name, report in reports.items():
        what = name.partition(".")[2]
        if what in ("oracle", "nop"):
            right = report["end"] == "returned" and report["reward"] == float(what == "oracle")
        elif "skipped" in report:
            continue
        elif "refused" in report:
            right = report["refused"]
        elif what in _INVALID:
            right = not report["valid"] and report["stop"] == "unjudged"
        elif what in _FAILED:
            right = report["valid"] and report["stop"] in ("agent_error", "wall_clock") and report["reward"] == 0.0
        else:
            right = report["valid"] and report["stop"] == "finished" and report["reward"] == float(what not in _NOTHING)
        if not right:
            found.append(f"{name}: {json.dumps(report)}")
        if report.get("violations") or report.get("completions") != report.get("accounted"):
            found.append(f"{name}: not every completion is accounted for: {json.dumps(report)}")
    return found


def left_behind() -> list[str]:
    """Return the names of remains of trials on this machine."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob("verl-multiturn-trials-*")]
    if shutil.which("podman") is not None:
        for listing in (["ps", "-a", "--format", "{{.Names}}"], ["network", "ls", "--format", "{{.Name}}"]):
            said = subprocess.run(
                ["podman", *listing], capture_output=True, text=True, encoding="utf-8", errors="replace"
            ).stdout
            found += [line for line in said.split() if line.startswith("vmt-")]
    return found


async def run_parts(names: list[str]) -> Reports:
    """Run parts; return the outcome of each session."""
    reports: Reports = {}
    with tempfile.TemporaryDirectory(prefix="harbor-tasks-") as folder:
        for name in names:
            await PARTS[name](Path(folder) / name, reports)
    return reports


def main() -> int:
    """Run the parts that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description="Try the bridge to Harbor on made tasks.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*PARTS, []], help=f"of {', '.join(PARTS)}")
    names = parser.parse_args().names or list(PARTS)
    logging.basicConfig(level=logging.ERROR)
    before = left_behind()
    reports = asyncio.run(run_parts(names))
    found = faults(reports)
    left = [each for each in left_behind() if each not in before]
    found += [f"left behind: {each}" for each in left]
    for fault in found:
        print(fault, file=sys.stderr)
    total = {key: sum(report.get(key, 0) for report in reports.values()) for key in ("completions", "accounted")}
    violations = sum(len(report.get("violations", ())) for report in reports.values())
    print(json.dumps({"trials": reports, **total, "violations": violations, "left": len(left), "faults": len(found)}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
