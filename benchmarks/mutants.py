"""Find faults that the tests miss: mutants of the code that handles tokens, masks, arguments and rewards.

    pip install cosmic-ray==8.7.0        # beside the environment's packages; nothing else needs it
    python -m benchmarks.mutants [--count 300] [--seed 0] [--only rollout] [--minutes 45]

A seed draws places in the code, and for each place one of the possible changes: a change of Cosmic Ray (another
operator, another number, a negated condition …), or a statement or a keyword argument that is removed. Annotations are
not changed. Changes that make no difference to Python (`is` and `==` of None) are skipped.

Each mutant is written into a copy of the tree. The few test files that cover its module then run until one fails. They
run in a process forked from one that has already imported the slow packages. There is one such process for each core.

The results are kept in `outputs/mutants/`, so that a later run continues where this one stopped. A survivor that is
listed in `benchmarks/results/mutants.yaml`, with the reason why it does not matter, counts as explained. The last line
is one JSON object. It also lists the explanations that explain nothing any more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import yaml

from benchmarks.mutant_draw import ROOT, Mutant, draw, state_of, tests_of

EXPLAINED = ROOT / "benchmarks" / "results" / "mutants.yaml"


OUT = ROOT / "outputs" / "mutants"

# A change: its module, and the lines before and after it.
Key = tuple[str, str, str]


def run_tests(tree: Path, tests: Sequence[str], log: Path, limit_s: float) -> str:
    """Run test files one after another until one does not pass.

    Args:
        tree: Folder with a copy of the repository.
        tests: Paths of the test files in it.
        log: File for the output of the last test file.
        limit_s: Seconds for all files together.

    Returns:
        "passed", "failed" or "timeout".
    """
    deadline = time.monotonic() + limit_s
    outcomes = (_run_file(tree, test, log, deadline) for test in tests)
    return next((outcome for outcome in outcomes if outcome != "passed"), "passed")


def _run_file(tree: Path, test: str, log: Path, deadline: float) -> str:
    """Run one test file in a copy of the tree, in a process forked from this one."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(tree)
            sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
            os.environ["PYTHONPATH"] = str(tree)
            import pytest

            ignored = "ignore::pytest.PytestAssertRewriteWarning"
            options = ["-x", "-q", "-p", "no:cacheprovider", "-W", ignored, "-m", "not engine and not long"]
            code = int(pytest.main([*options, test]))
        finally:
            os._exit(code)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if status == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def prepare() -> None:
    """Import the packages that most tests import.

    This package and verl, which imports it, are not among them: each mutant has to be imported anew.
    """
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    slow = "hypothesis pytest_asyncio pandas PIL.Image pydantic torch transformers typer"  # imports of most tests
    slow += " ray tensordict transfer_queue datasets hydra peft wandb sglang fastapi uvicorn"  # imports of verl
    for name in slow.split():
        importlib.import_module(name)


def copy_tree(target: Path) -> None:
    """Copy the repository's files into a folder, tracked or not; without those that git ignores."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def examine(mutants: Sequence[Mutant], found: Path, deadline: float) -> None:
    """Run the tests of each mutant, and append the results to a file.

    There is one process for each core. Each process takes all mutants of a module, then those of the next module.

    Args:
        mutants: The mutants to examine.
        found: File with one JSON object per line.
        deadline: Time of `time.monotonic()` after which no mutant is begun.
    """
    modules = [list(group) for _, group in groupby(sorted(mutants, key=_module), key=_module)]
    modules.sort(key=len, reverse=True)
    reading, writing = os.pipe()
    os.write(writing, bytes(range(len(modules))))
    os.close(writing)
    prepare()
    workers = []
    for _ in range(os.cpu_count() or 1):
        workers.append(os.fork())
        if not workers[-1]:
            # No `TemporaryDirectory`: pytest in a fork may run the functions registered for the end of this process.
            folder, status = Path(tempfile.mkdtemp()), 1
            try:
                copy_tree(folder / "tree")
                while time.monotonic() < deadline and (taken := os.read(reading, 1)):
                    _examine_module(modules[taken[0]], folder, found, deadline)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(status)
    for worker in workers:
        os.waitpid(worker, 0)


def _module(mutant: Mutant) -> str:
    return mutant.module


def _examine_module(mutants: Sequence[Mutant], folder: Path, found: Path, deadline: float) -> None:
    tree, log = folder / "tree", folder / "log"
    tests, path = tests_of(mutants[0]), tree / mutants[0].module
    source = path.read_text(encoding="utf-8")
    started = time.monotonic()
    if run_tests(tree, tests, log, limit_s=600) != "passed":
        print(f"{tests} do not pass without a mutant:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        return
    limit_s = 30 + 4 * (time.monotonic() - started)
    for mutant in mutants:
        if time.monotonic() > deadline:
            return
        module, covering = state_of(mutant, tree)
        started = time.monotonic()
        path.write_text(mutant.source, encoding="utf-8")
        try:
            outcome = run_tests(tree, tests, log, limit_s)
        finally:
            path.write_text(source, encoding="utf-8")
        result = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
        seconds = round(time.monotonic() - started, 1)
        print(f"{result:9} {seconds:6} s  {mutant.module}:{mutant.line} {mutant.what}", flush=True)
        line = {"name": mutant.name, "module": module, "tests": covering, "result": result, "seconds": seconds}
        line |= {"before": mutant.before, "after": mutant.after}
        with found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def known(found: Path, drawn: Sequence[Mutant]) -> dict[Mutant, str]:
    """Return the results of the mutants that were already examined.

    A mutant that the tests saw counts as seen until its definition changes. A mutant that survived counts only until
    its definition or its tests change; then it is examined again.

    Args:
        found: File that `examine` writes.
        drawn: Mutants to look up.
    """
    lines = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()] if found.exists() else []
    results = {(line["name"], line["module"], line["tests"]): line["result"] for line in lines}
    killed = {(line["name"], line["module"]): line["result"] for line in lines if line["result"] != "survived"}
    known = {}
    for mutant in drawn:
        module, tests = state_of(mutant)
        result = killed.get((mutant.name, module)) or results.get((mutant.name, module, tests))
        if result:
            known[mutant] = result
    return known


def explained() -> dict[Key, str]:
    """Return the reasons why survivors do not matter, by the change."""
    entries = yaml.safe_load(EXPLAINED.read_text(encoding="utf-8")) or [] if EXPLAINED.exists() else []
    return {(each["module"], each["before"].strip(), each["after"].strip()): each["why"] for each in entries}


def key_of(mutant: Mutant) -> Key:
    """Return the change of a mutant, by which its explanation is found."""
    return mutant.module, mutant.before.strip(), mutant.after.strip()


def unused(reasons: Iterable[Key], results: dict[Mutant, str], root: Path = ROOT) -> list[Key]:
    """Return the explanations that explain nothing: their lines are gone, or the tests see their mutant.

    An explanation whose lines are there, and whose mutant was not drawn, is not returned.

    Args:
        reasons: Changes that are explained.
        results: Results of the mutants that were examined.
        root: Folder of the repository.
    """
    seen = {key_of(mutant) for mutant, result in results.items() if result != "survived"}
    seen -= {key_of(mutant) for mutant, result in results.items() if result == "survived"}  # the line occurs twice
    return [key for key in reasons if key in seen or not _is_there(root / key[0], key[1])]


def _is_there(module: Path, before: str) -> bool:
    """Return whether a module has lines, whatever their indentation."""
    lines = module.read_text(encoding="utf-8").splitlines() if module.is_file() else []
    return {line.strip() for line in before.splitlines()} <= {line.strip() for line in lines}


def main() -> None:
    """Draw mutants, examine the new ones, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="examine only the drawn mutants of modules whose path holds this")
    parser.add_argument("--minutes", type=float, default=45, help="examine none after that")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    found = OUT / f"{args.seed}.jsonl"
    drawn = draw(args.count, args.seed)
    before = known(found, drawn)
    todo = [m for m in drawn if args.only in m.module and m not in before]
    print(f"{len(drawn)} mutants are drawn, {len(todo)} are to be examined", flush=True)
    deadline = time.monotonic() + 60 * args.minutes
    examine(todo, found, deadline)
    report(drawn, known(found, drawn))


def report(drawn: Sequence[Mutant], results: dict[Mutant, str]) -> None:
    """Print the survivors without a reason, then one line of JSON."""
    reasons = explained()
    of = {mutant: results.get(mutant, "not examined") for mutant in drawn}
    survivors = [mutant for mutant, result in of.items() if result == "survived"]
    open_ones = [m for m in survivors if key_of(m) not in reasons]
    for mutant in open_ones:
        print(f"\nsurvived: {mutant.module}:{mutant.line} {mutant.what}\n- {mutant.before}\n+ {mutant.after}")
    counts = {name: sum(result == name for result in of.values()) for name in ("killed", "timeout", "not examined")}
    figures = {
        "mutants": len(drawn),
        "killed": counts["killed"] + counts["timeout"],
        "explained": len(survivors) - len(open_ones),
        "survived": len(open_ones),
        "not_examined": counts["not examined"],
        "unused_explanations": [list(key) for key in unused(reasons, results)],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
