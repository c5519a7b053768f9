"""Is a stranger's folder data, and nothing but data, to every command that opens one?

    python -m benchmarks.strangers_folder [--short] [--case WORDS …] [--command NAME …] [--keep DIR]

A folder that somebody sends is a run, a checkpoint, a Hugging Face folder, an evaluation, a corpus or a file of rows. A
case is an honest one with one change: a tools YAML with a command, a pipe in the place of a file, an index with other
scores. Each command opens each case in a process of its own, under a watch (`strangers_watch.py`), as it opened the
honest folder before. All that the honest folder did not need is counted.

`replay`, `eval` and `probe` run a folder's code by their nature: they must refuse, and name `--trust`.

Exit status 1: something was counted. The last line is one JSON object; the lines above it name each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.long.strangers.strangers_cases import Case
from tests.long.strangers.strangers_commands import Command, Figures, figures_of, says_faults
from tests.long.strangers.strangers_material import MARK, World, everything, make_world
from tests.long.strangers.strangers_models import model_cases, other_cases
from tests.long.strangers.strangers_records import record_cases
from tests.long.strangers.strangers_settings import setting_cases
from tests.long.strangers.strangers_watch import ACCESS, CHANGE, OPEN, WENT_ON
from verl_multiturn.cli import commands

KEYS = ("started", "imported", "fetched", "read_outside", "written_outside", "hung", "wrong_figures", "tracebacks",
        "unrefused")  # fmt: skip
_REFUSALS = ("--trust", "leads out of", "holds no records")
"""Parts of the errors by which a command refuses; the last one where its records would be the reader's."""
MOST_MB = 512
CPU_S = 60
SPARED_S = 20
"""CPU seconds of a command on a strange folder, beside those of the honest one."""
_COMMANDS = ("verl_multiturn.cli.main", *(f"verl_multiturn.cli.{place.module}" for place in commands.COMMANDS.values()))
_MODULES = {
    "light": (*_COMMANDS, "pandas", "verl_multiturn.observe.view.server"),
    "heavy": (
        *_COMMANDS,
        "torch",
        "accelerate",
        "peft",
        "transformers.models.qwen2.modeling_qwen2",
        "verl_multiturn.models.export",
    ),
}
"""Lanes, and the imports of a process of each."""
_MAPPED = (".safetensors", ".pt")
"""Files that are mapped into memory, whose reads are not visible."""
TITLE = (__doc__ or "").split("\n")[0]


@dataclass
class Seen:
    """Reports the actions of a command with a folder."""

    case: str
    command: str
    counted: dict[str, str] = field(default_factory=dict)
    """Observations by the key that counts them."""
    memory_mb: int = 0
    figures: Figures = field(default_factory=dict)
    said: bool = False
    """Whether it refused, or reported that something could not be read."""


class Lane:
    """A process that forks one command after another."""

    def __init__(self, world: World, modules: Sequence[str]) -> None:
        self._world = world
        places = [os.getcwd(), os.environ.get("PYTHONPATH", ""), str(world.site)]
        environment = {**os.environ, **_environment(world), "PYTHONPATH": os.pathsep.join(filter(None, places))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.long.strangers.strangers_watch", *modules], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"a process with {', '.join(modules)} cannot begin; import these to see why")

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job, and return the observations."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the watch ended; run one case alone to see why")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Trial:
    """Runs commands on folders, each beside its run on the honest one."""

    def __init__(self, world: World, lane: Lane) -> None:
        self._world, self._lane = world, lane
        self._honest: dict[str, dict[str, Any]] = {}

    def honest(self, command: Command) -> dict[str, Any]:
        """Return a command's actions on the honest folder.

        Raises:
            RuntimeError: It fails.
        """
        if command.name not in self._honest:
            place = self._world.root / "trials" / "honest" / command.name.replace(" ", "_")
            place.mkdir(parents=True)
            folder = place / "run"
            shutil.copytree(self._world.honest(command.material), folder, symlinks=True)
            seen = self._run(command, folder, place, None, honest=True)
            if command.kind in ("plain", "view") and seen["status"] not in (0, 1):
                raise RuntimeError(f"{command.name} fails with the honest folder: {_errors(place / 'out')}")
            self._honest[command.name] = {**seen, "figures": figures_of(command, place / "out")}
        return self._honest[command.name]

    def try_case(self, case: Case, commands: Iterable[Command]) -> Iterator[Seen]:
        """Run commands on a case, and yield the actions of each."""
        place = self._world.root / "trials" / _file(case.name)
        folder, before = place / case.folder, dict[str, tuple[int, ...]]()
        for command in commands:
            honest = self.honest(command)
            if not before:
                shutil.copytree(self._world.honest(case.material), folder, symlinks=True)
                case.change(folder, self._world)
                before = _snapshot(folder)
            seen = self._run(command, folder, place, case)
            changed = _differences(before, _snapshot(folder), command.writes, case.planted)
            yield self._judged(case, command, seen, honest, place, changed)
            _empty(self._world.canary, self._world.root / "tmp", place / "out")
            if changed or case.planted:
                _empty(folder)
                folder.rmdir()
                before = {}
        if before or place.is_dir():
            _empty(place)
            self._world.renew()

    def _run(
        self, command: Command, folder: Path, place: Path, case: Case | None, honest: bool = False
    ) -> dict[str, Any]:
        out, world = place / "out", self._world
        out.mkdir(exist_ok=True)
        known = {} if honest else self.honest(command)
        planted, is_inside = [], case is not None and case.inside and command.kind == "plain" and not command.script
        if case is not None and case.planted:
            planted = [(str(world.secret), str(folder / "records" / ".view-index.parquet.PID"))]
        return self._lane.ask(
            {
                "argv": command.words(folder, out, world),
                "cwd": str(folder if is_inside else place),
                "fresh": is_inside,
                "out": str(out),
                "allowed": [each for each in known.get("events", ()) if each[0] in ("start", "connect")],
                "cpu_s": CPU_S if honest else known["cpu_s"] + SPARED_S,
                "secrets": str(world.secrets),
                "roots": [str(folder), str(world.site)],
                "honest": honest,
                "kind": command.kind,
                "script": None if command.script is None else str(command.script),
                "planted": planted,
            }
        )

    def _judged(
        self,
        case: Case,
        command: Command,
        seen: dict[str, Any],
        honest: dict[str, Any],
        place: Path,
        changed: list[str],
    ) -> Seen:
        """Return the observations that count."""
        out, found = place / "out", Seen(case.name, command.name, memory_mb=seen["memory_mb"] - honest["memory_mb"])
        known = {tuple(each) for each in honest["events"]}
        fresh = [(kind, what) for kind, what in map(tuple, seen["events"]) if (kind, what) not in known]
        for kind, key in (("start", "started"), ("connect", "fetched"), ("code", "imported")):
            if named := [what for own, what in fresh if own == kind]:
                found.counted[key] = ", ".join(named[:3])
        if named := [what for own, what in fresh if own == "import" and what in ("stranger_canary", "evil", "run")]:
            found.counted["imported"] = ", ".join(named)
        if named := [what for own, what in fresh if own == "class" and what.startswith(("os.", "posix.", "nt."))]:
            found.counted["imported"] = ", ".join(named)
        if canaries := sorted(path.name for path in self._world.canary.iterdir()):
            found.counted["started" if "code" not in canaries[0] else "imported"] = f"canary: {', '.join(canaries)}"
        if read := [
            name for name, mask in seen["secrets"] if mask & ACCESS or (mask & OPEN and name.endswith(_MAPPED))
        ]:
            found.counted["read_outside"] = f"read: {', '.join(read[:3])}"
        if leaked := [path.name for path in everything(out) if _holds(path, MARK) and path.name != "events"]:
            found.counted["read_outside"] = f"the secret stands in {', '.join(leaked[:3])}"
        writable = [str(self._world.root / name) for name in ("home", "tmp")] + [str(out)]
        written = [what for kind, what in fresh if kind == "write" and not what.startswith(tuple(writable))]
        written = [what for what in written if not what.startswith(str(place))] + changed
        written += [name for name, mask in seen["secrets"] if mask & CHANGE]
        if written:
            found.counted["written_outside"] = ", ".join(written[:3])
        if seen["why"] and seen["why"] != "memory":
            found.counted["hung"] = seen["why"]
        errors = _errors(out)
        if "Traceback (most recent call last)" in errors or (
            seen["status"] not in (0, 1, 2, 130, WENT_ON) and not seen["why"]
        ):
            found.counted["tracebacks"] = f"status {seen['status']}: {errors.strip().splitlines()[-1:]}"
        if command.kind == "refuse" and (seen["status"] != 2 or not any(each in errors for each in _REFUSALS)):
            went = next((what for kind, what in fresh if kind == "went on"), "")
            found.counted["unrefused"] = f"status {seen['status']} {went} {errors.strip().splitlines()[-1:]}"
        self._weigh(case, command, found, seen["status"], honest["figures"], out)
        return found

    def _weigh(self, case: Case, command: Command, found: Seen, status: int, figures: Figures, out: Path) -> None:
        """Compare the figures that a command printed with those of the honest folder."""
        found.figures = figures_of(command, out)
        is_refused = status not in (0, 1) or (not found.figures and bool(_errors(out)))
        found.said = is_refused or says_faults(command, out)
        if case.counted and not found.said and any(found.figures.get(name) != value for name, value in figures.items()):
            found.counted["wrong_figures"] = f"{found.figures}, and the records have {figures}"


def _environment(world: World) -> dict[str, str]:
    """Return the contents of the reader's environment: folders of his own, and a secret."""
    home = str(world.root / "home")
    return {
        "HOME": home,
        "TMPDIR": str(world.root / "tmp"),
        "XDG_CACHE_HOME": f"{home}/.cache",
        "HF_HOME": f"{home}/.cache/huggingface",
        "HF_MODULES_CACHE": f"{home}/.cache/huggingface/modules",
        "HF_HUB_OFFLINE": "0",
        "MY_API_TOKEN": MARK,
        "TERM": "dumb",
    }


def _holds(path: Path, text: str) -> bool:
    return (
        path.is_file()
        and not path.is_symlink()
        and path.stat().st_size < 1 << 28
        and text.encode() in path.read_bytes()
    )


def _errors(out: Path) -> str:
    return (out / "stderr").read_text(encoding="utf-8", errors="replace")


def _file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)[:60]


def _snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the files in a folder, with sizes and times."""
    found = dict[str, tuple[int, ...]]()
    for path in everything(folder):
        about = path.lstat()
        kept = 0 if path.is_dir() and not path.is_symlink() else about.st_mtime_ns
        found[str(path.relative_to(folder))] = (about.st_mode, 0 if kept == 0 else about.st_size, kept)
    return found


def _differences(before: dict[str, Any], after: dict[str, Any], allowed: Sequence[str], is_planted: bool) -> list[str]:
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if is_planted:  # the links are the case's own
        changed = {name for name in changed if "/.view-index.parquet." not in name}
    return sorted(f"in the folder: {name}" for name in changed if Path(name).name not in allowed)


def _empty(*folders: Path) -> None:
    """Remove the files in folders."""
    for folder in folders:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


PARTS = {"settings": setting_cases, "records": record_cases, "models": model_cases, "others": other_cases}


def all_cases(parts: Iterable[str] = PARTS) -> list[Case]:
    """Return all cases, or those of some parts."""
    return [case for part in parts for case in PARTS[part]()]


def disagreements(seen: Sequence[Seen]) -> Iterator[Seen]:
    """Yield a finding for each case of which two commands print different figures, and neither reports a fault."""
    by_case: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        by_case[each.case].append(each)
    for name, own in by_case.items():
        for key in ("conversations", "scores", "recorded"):
            said = {each.command: each.figures[key] for each in own if key in each.figures and not each.said}
            if len(set(said.values())) > 1:
                yield Seen(name, " and ".join(said), {"wrong_figures": f"{key}: {said}"})


def run(cases: Sequence[Case], commands: Sequence[Command], is_short: bool, keep: Path | None = None) -> dict[str, Any]:
    """Try the cases, print the counts, and return the figures.

    Args:
        cases: The cases.
        commands: The commands.
        is_short: As in `try_all`.
        keep: Where to make the folders; the honest ones stay. None: nothing stays.
    """
    root = (keep or Path(tempfile.mkdtemp(prefix="strangers-"))).absolute()
    try:
        seen = try_all(root, cases, commands, is_short)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    seen += map(_announced, list(disagreements(seen)))
    return summary_of(seen, cases, commands)


def try_all(root: Path, cases: Sequence[Case], commands: Sequence[Command], is_short: bool = False) -> list[Seen]:
    """Try cases in two lanes, each with a world of its own: one for commands that need torch, one for the others.

    Args:
        root: Folder for all folders.
        cases: The cases.
        commands: The commands.
        is_short: Whether a change of the records is tried by commands that read records alone, and one of the
            configuration or the model by those that need torch.
    """
    of_records = {case.name for case in all_cases(("records", "others"))}

    def near(case: Case, command: Command) -> bool:
        is_near = command.heavy != (case.name in of_records) or command.name == "show --json"
        return command.material == case.material and (is_near or not is_short)

    lanes = {
        name: [each for each in commands if each.heavy == heavy] for name, heavy in (("light", False), ("heavy", True))
    }
    worlds = {name: make_world(root / name) for name, own in lanes.items() if own}

    def in_lane(name: str) -> list[Seen]:
        made = Lane(worlds[name], _MODULES[name])
        try:
            trial = Trial(worlds[name], made)
            return [
                _announced(seen)
                for case in cases
                for seen in trial.try_case(case, [each for each in lanes[name] if near(case, each)])
            ]
        finally:
            made.close()

    with ThreadPoolExecutor(2) as pool:
        return [seen for found in pool.map(in_lane, worlds) for seen in found]


def _announced(seen: Seen) -> Seen:
    """Print the counts, and return them."""
    for key, what in sorted(seen.counted.items()):
        print(f"{key}: {seen.command}: {seen.case}: {what[:300]}", flush=True)
    if seen.memory_mb > MOST_MB:
        print(f"memory_mb: {seen.command}: {seen.case}: {seen.memory_mb}", flush=True)
    return seen


def summary_of(seen: Sequence[Seen], cases: Sequence[Case], commands: Sequence[Command]) -> dict[str, Any]:
    """Return the keys of the last line."""
    counts = {key: sum(key in each.counted for each in seen) for key in KEYS}
    memory = max((each.memory_mb for each in seen), default=0)
    runs = sum(" and " not in each.command for each in seen)
    holds = not any(counts.values()) and memory <= MOST_MB and runs > 0
    return {"cases": len(cases), "commands": len(commands), "runs": runs, **counts, "memory_mb": memory, "holds": holds}
