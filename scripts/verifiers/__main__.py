"""Try the bridge to verifiers on five environments, with a scripted model behind the real endpoint.

    python -m scripts.verifiers [NAME…] [--rows 16] [--siblings 8] [--programs 2]     parts, as in PARTS; all by default

- the name of an environment: its sessions, `--rows` tasks with `--siblings` siblings each, have the rewards that
  verifiers' own evaluation has at the same endpoint. The first `--programs` tasks are evaluated once more with a
  program for each segment, as verifiers has it. Seats that are not trainable have no token that is trained;
- `killed`: the process of an environment is killed under its sessions, which are invalid; the next ones are played;
- `held`: an environment that holds up its event loop, and one that never ends;
- `refusals`: settings and rows that cannot work, each refused by name.

TextArena's Hangman is played with a word list of the script's own where there is none (`made_words`).
The last line is one JSON object. The exit status is 1 if something is not as it has to be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.harbor.sessions import sessions_of
from scripts.verifiers.model import say
from tests.support.template_play import template_of
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.verifiers.runner import VerifiersRunner, check_verifiers
from verl_multiturn.proxy.agents.process_runner import ProcessRunner
from verl_multiturn.proxy.sessions.roles import Roles

PYTHON = os.environ.get("VERIFIERS_PYTHON") or str(Path(".venv-verifiers/bin/python").absolute())
PATHS = [str(Path("recipes/hub/tasksets").absolute()), str(Path("scripts/verifiers/tasksets").absolute())]
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
ROLES = ["agent", "player", "assistant", "user", "buyer", "seller"]
TRAIN = [name for name in ROLES if name != "user"]
Report = dict[str, Any]


def environments(counter: str) -> dict[str, dict[str, Any]]:
    """Return the environments by name."""
    goals = [{"goal": goal} for goal in range(4, 20)]
    return {
        "shop": {"taskset": {"id": "shop"}, "agent": LOCAL},
        "haggle": {"taskset": {"id": "haggle"}, "buyer": LOCAL, "seller": LOCAL},
        "user_sim": {"id": "user-sim", "taskset": {"id": "shop"}, "assistant": LOCAL, "user": LOCAL},
        "hangman": {"taskset": {"id": "textarena", "game": "Hangman-v0"}, "player": LOCAL},
        "counter": {"taskset": {"id": "openenv", "base_url": counter, "resets": goals}, "player": LOCAL},
    }


def settings_of(envs: Mapping[str, Any], **changed: Any) -> ProxySettings:
    """Return the endpoint's settings for some environments."""
    return ProxySettings.model_validate(
        {
            "agent": "verifiers",
            "python": PYTHON,
            "roles": ROLES,
            "train": TRAIN,
            "verifiers": {"paths": PATHS, "envs": dict(envs)},
        }
        | changed
    )


async def rewards(name: str, envs: Mapping[str, Any], options: argparse.Namespace, folder: Path) -> Report:
    """Play an environment's sessions, and compare their rewards with those of verifiers' own evaluation."""
    settings = settings_of({name: envs[name]})
    runner = VerifiersRunner(settings, PYTHON)
    began = time.monotonic()
    tasks = await runner.rows(name, 0, options.rows)
    rows = [task for task in tasks for _ in range(options.siblings)]
    template = template_of("qwen3")
    async with sessions_of(template, runner, [say] * len(rows), roles=Roles.of(settings)) as one:
        at_once = asyncio.Semaphore(16)

        async def session(index: int, row: Mapping[str, Any]) -> dict[str, Any]:
            async with at_once:
                return await one(index, {"verifiers": {"env": name, "task": json.dumps(row["task"])}})

        played = await asyncio.gather(*(session(*each) for each in enumerate(rows)))
    seconds = time.monotonic() - began
    own = await own_rewards(name, envs[name], options.rows, False, folder)
    programs = await own_rewards(name, envs[name], options.programs, True, folder) if options.programs else own
    theirs = own["rewards"]
    wrong = [
        {"task": row["name"], "session": _rewards(end), "own": theirs.get(row["name"]), "problem": end["problem"]}
        for row, end in zip(rows, played, strict=True)
        if not end["valid"] or _rewards(end) != theirs.get(row["name"])
    ]
    changed = {task: [found, theirs.get(task)] for task, found in programs["rewards"].items() if found != theirs[task]}
    trained = sum(_tokens(end, lambda role: role not in TRAIN) for end in played)
    return {
        "sessions": len(played),
        "equal": len(played) - len(wrong),
        "values": sorted({value for end in played for value in _rewards(end).values()})[:12],
        "untrainable_tokens": trained,
        "trained_tokens": sum(_tokens(end, lambda role: role in TRAIN) for end in played),
        "completions": sum(end["completions"] for end in played),
        "accounted": sum(end["accounted"] for end in played),
        "violations": sum(len(end["violations"]) for end in played),
        "by_programs": len(programs["rewards"]),
        "seconds": round(seconds, 1),
        "own_seconds": round(time.monotonic() - began - seconds, 1),
        "faults": [
            *(f"{name}: {json.dumps(each)}"[:1_000] for each in wrong[:3]),
            *(f"{name}: with programs {task} has {found}" for task, found in changed.items()),
            *(f"{name}: its own evaluation: {error}"[:500] for error in (own["errors"] + programs["errors"])[:3]),
            *([f"{name}: {trained} tokens of seats that are not trainable are trained"] if trained else []),
            *(f"{name}: {each}" for end in played[:50] for each in end["violations"]),
        ],
    }


def _rewards(end: Mapping[str, Any]) -> dict[str, float]:
    return dict(end["record"]["session"].get("rewards") or {})


def _tokens(end: Mapping[str, Any], of: Callable[[str], bool]) -> int:
    """Return the trained tokens of some roles."""
    generations = end["record"]["generations"]
    return sum(each["tokens"] for each in generations if each["row"] is not None and of(each["role"]))


async def own_rewards(name: str, env: Mapping[str, Any], count: int, programs: bool, folder: Path) -> dict[str, Any]:
    """Have verifiers evaluate an environment at an endpoint of the same model; return its rewards by task and seat."""
    out = folder / f"{name}-{programs}.json"
    asked = {
        "env": env,
        "paths": PATHS,
        "count": count,
        "out": str(out),
        "programs": programs,
        "with_roles": True,
        "folder": tempfile.mkdtemp(dir=folder),
    }
    runner = ProcessRunner("scripts.verifiers.own_evaluation:run", None, "proxy.agent", PYTHON)
    roles = Roles(tuple(ROLES), tuple(TRAIN))
    async with sessions_of(template_of("qwen3"), runner, [say], roles=roles) as one:
        end = await one(0, {"evaluation": asked})
    if not out.exists():
        return {"rewards": {}, "errors": [end["problem"]]}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


async def killed(envs: Mapping[str, Any], folder: Path) -> Report:
    """Kill the process of an environment under its sessions."""
    settings = settings_of({"shop": envs["shop"]})
    runner = VerifiersRunner(settings, PYTHON)
    [row] = await runner.rows("shop", 0, 1)
    extra = {"verifiers": {"env": "shop", "task": json.dumps(row["task"])}}
    first = runner.processes["shop"]

    def kill(prompt: str, turn: int) -> str:
        if turn == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        return say(prompt, turn)

    async with sessions_of(template_of("qwen3"), runner, [kill] * 4 + [say] * 4, roles=Roles.of(settings)) as one:
        under = await asyncio.gather(*(one(index, extra) for index in range(4)))
        after = await asyncio.gather(*(one(index, extra) for index in range(4, 8)))
        second = runner.processes.get("shop")
    return {
        "under": [[end["stop"], end["valid"]] for end in under],
        "after": [[end["stop"], end["valid"], _rewards(end)] for end in after],
        "faults": [
            *(f"killed: {end['stop']}, valid {end['valid']}" for end in under if end["valid"]),
            *(f"after a kill: {end['stop']} {end['problem']}" for end in after if not end["valid"]),
            *(["the process was not killed"] if second == first else []),
        ],
    }


async def held(envs: Mapping[str, Any], folder: Path) -> Report:
    """Play a session that holds up the event loop of its environment, and one that never ends, beside another."""
    ends: Report = {}
    faults = []
    for how in ("waits", "holds"):
        settings = settings_of({"odd": {"taskset": {"id": "odd", "how": how}, "agent": LOCAL}})
        runner = VerifiersRunner(settings, PYTHON)
        [row] = await runner.rows("odd", 0, 1)
        extra = {"verifiers": {"env": "odd", "task": json.dumps(row["task"])}}
        began = time.monotonic()
        async with sessions_of(template_of("qwen3"), runner, [say], 20.0, Roles.of(settings)) as one:
            end = await one(0, extra)
        ends[how] = {
            "stop": end["stop"],
            "problem": end["problem"][:200],
            "seconds": round(time.monotonic() - began, 1),
        }
        if end["stop"] not in ("wall_clock", "agent_failed"):
            faults.append(f"held: {how} ended by {end['stop']}: {end['problem']}")
    return {**ends, "faults": faults}


async def refusals(envs: Mapping[str, Any], folder: Path) -> Report:
    """Ask verifiers' Python of settings that cannot work."""
    shop = envs["shop"]
    wrong: dict[str, ProxySettings] = {
        "needs an account": settings_of({"shop": {**shop, "agent": {"harness": {"id": "null"}}}}),
        "not found": settings_of({"shop": {**shop, "taskset": {"id": "no-such-taskset"}}}),
        "Extra inputs": settings_of({"shop": {**shop, "taskset": {"id": "shop", "strange": 1}}}),
        "is not to be trained, and without roles": settings_of({"u": envs["user_sim"]}, roles=None, train=None),
        "would share one reward": settings_of({"h": envs["haggle"]}, roles=None, train=None),
        "and proxy.train has it": settings_of({"u": envs["user_sim"]}, train=None),
        "is none of proxy.roles": settings_of({"h": envs["haggle"]}, roles=["buyer"], train=None),
        "is not repeated": settings_of({"shop": {**shop, "retries": {"max_retries": 1}}}),
    }
    said: Report = {}

    def ask(settings: ProxySettings) -> str:
        try:
            check_verifiers(settings, PYTHON)
        except ConfigError as error:
            return str(error)
        return "nothing"

    for words, settings in wrong.items():
        said[words] = await asyncio.to_thread(ask, settings)
    if not (Path(PYTHON).parents[1] / "nltk_data").exists():
        words = os.environ.pop("NLTK_DATA", "")
        said["need the word list"] = await asyncio.to_thread(ask, settings_of({"h": envs["hangman"]}))
        os.environ["NLTK_DATA"] = words
    good = await asyncio.to_thread(ask, settings_of(envs))
    faults = [f"refusals: {words!r} is not in {text!r}" for words, text in said.items() if words not in text]
    faults += [f"refusals: good settings were refused: {good}"] if good != "nothing" else []
    return {"refused": len(said) - len(faults), "of": len(said), "faults": faults}


@contextlib.asynccontextmanager
async def counter_server(folder: Path) -> AsyncIterator[str]:
    """Start the OpenEnv server of `recipes/hub`, and yield its address."""
    port = folder / "port"
    process = subprocess.Popen([PYTHON, "recipes/hub/counter_server.py", str(port)])  # noqa: ASYNC220 - it only starts
    try:
        for _ in range(1_200):
            if port.exists() and port.read_text(encoding="ascii"):
                break
            if process.poll() is not None:
                raise RuntimeError("the OpenEnv server ended at its start")
            await asyncio.sleep(0.25)
        number = port.read_text(encoding="ascii")
        yield f"http://127.0.0.1:{number}"
    finally:
        process.kill()
        process.wait()


def made_words(folder: Path) -> None:
    """Give Hangman a word list where there is none."""
    words = folder / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    text = "apple\nhouse\nriver\nstone\ngreen\nmusic\ntable\nbread\nnight\nsugar\nanimal\nengine\nrhythm\nonion\n"
    for name in ("en", "en-basic"):
        (words / name).write_text(text, encoding="ascii")
    (folder / "nltk_data" / "taggers" / "averaged_perceptron_tagger_eng").mkdir(parents=True)
    os.environ["NLTK_DATA"] = str(folder / "nltk_data")


PARTS: dict[str, Callable[[Mapping[str, Any], Path], Awaitable[Report]]] = {
    "killed": killed,
    "held": held,
    "refusals": refusals,
}
NAMES = ("shop", "haggle", "user_sim", "hangman", "counter")


def left_behind() -> list[str]:
    """Return the remains of environments on this machine: folders, files of ports, processes."""
    temporary = Path(tempfile.gettempdir())
    found = [str(path) for pattern in ("verl-multiturn-verifiers-*", "vf-*") for path in temporary.glob(pattern)]
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if command[0].decode(errors="replace") == PYTHON:
                found.append(f"process {process}")
    return found


async def run_parts(options: argparse.Namespace) -> dict[str, Report]:
    """Run parts; return their reports."""
    reports: dict[str, Report] = {}
    names: Sequence[str] = options.names or (*NAMES, *PARTS)
    with tempfile.TemporaryDirectory(prefix="hub-") as made:
        folder = Path(made)
        made_words(folder)
        needs_server = "counter" in names or "refusals" in names
        async with counter_server(folder) if needs_server else contextlib.nullcontext("") as counter:
            envs = environments(counter)
            for name in names:
                if name in PARTS:
                    reports[name] = await PARTS[name](envs, folder)
                else:
                    reports[name] = await rewards(name, envs, options, folder)
                print(json.dumps({name: reports[name]}), file=sys.stderr, flush=True)
    return reports


def main() -> int:
    """Run the parts that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description="Try the bridge to verifiers on five environments.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, *PARTS, []])
    parser.add_argument("--rows", type=int, default=16, help="tasks of each environment")
    parser.add_argument("--siblings", type=int, default=8, help="sessions of each task")
    parser.add_argument(
        "--programs", type=int, default=2, help="tasks that are evaluated with verifiers' programs, too"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    before = left_behind()
    reports = asyncio.run(run_parts(options))
    left = [each for each in left_behind() if each not in before]
    faults = [fault for report in reports.values() for fault in report.pop("faults")]
    faults += [f"left behind: {each}" for each in left]
    for fault in faults:
        print(fault, file=sys.stderr)
    total = {
        key: sum(report.get(key, 0) for report in reports.values())
        for key in ("sessions", "equal", "untrainable_tokens", "completions", "accounted", "violations")
    }
    print(json.dumps({"parts": reports, **total, "left": len(left), "faults": len(faults)}))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
