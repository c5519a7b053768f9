"""Which faults of the code do the tests miss? Mutants of the code that handles tokens, masks, arguments and rewards.

    pip install cosmic-ray==8.7.0        # beside the environment's packages; nothing else needs it
    python -m benchmarks.mutants [--count 300] [--seed 0] [--only rollout] [--minutes 45]

A seed draws places in the code, and for each place one of the possible changes: a change of Cosmic Ray (another
operator, another number, a negated condition …), or a statement or a keyword argument that is left out. Annotations are
no places. Changes that make no difference to Python (`is` and `==` of None) are left out.

Each mutant is written into a copy of the tree. The few test files that cover its module then run until one fails. They
run in a process forked from one that has already imported the slow packages. There is one such process for each core.

The results are kept in `outputs/mutants/`, so that a later run continues where this one stopped. A survivor that stands
in `benchmarks/results/mutants.yaml`, with the reason why it does not matter, counts as explained. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = ROOT / "benchmarks" / "results" / "mutants.yaml"
OUT = ROOT / "outputs" / "mutants"

UNIT, STACK = "tests/unit/test_", "tests/integration/test_"
PARSING = [f"{UNIT}exact_arguments", f"{UNIT}parsers", f"{UNIT}reading_turns"]
# Modules, and the tests that cover each of them, the most sensitive tests first.
COVERED: dict[str, list[str]] = {
    "rollout/conversation": [f"{UNIT}conversation", f"{UNIT}unseen_faults", f"{UNIT}conversation_ends", f"{UNIT}tir"],
    "rollout/limits": [f"{UNIT}unseen_faults", f"{UNIT}clipping", f"{UNIT}conversation_ends"],
    "rollout/marker": [f"{UNIT}below_receipts", f"{UNIT}tir"],
    "rollout/placeholders": [f"{UNIT}below_receipts", f"{UNIT}images"],
    "certificate/receipts": [f"{UNIT}receipts", f"{UNIT}certificate", f"{UNIT}void_turns"],
    "rollout/scripted": [f"{UNIT}conversation", f"{UNIT}conversation_ends", f"{UNIT}images"],
    "rollout/tool_reward": [f"{UNIT}metrics"],
    "rollout/trajectory": [f"{UNIT}trajectory", f"{UNIT}conversation", f"{UNIT}receipts"],
    "rollout/void_turns": [f"{UNIT}void_turns"],
    "certificate/check": [f"{UNIT}certificate", f"{UNIT}void_turns", f"{UNIT}images"],
    "chat/parsing/formats": PARSING,
    "chat/parsing/call_json": PARSING,
    "chat/parsing/harmony": PARSING,
    "chat/parsing/arguments": PARSING,
    "chat/parsing/gemma": PARSING,
    "chat/parsing/json_calls": PARSING,
    "chat/parsing/llama": PARSING,
    "chat/parsing/pythonic": PARSING,
    "chat/parsing/reasoning": PARSING,
    "chat/parsing/tags": PARSING,
    "chat/parsing/text_parser": [*PARSING, f"{UNIT}conversation"],
    "chat/parsing/turns": [*PARSING, f"{UNIT}conversation"],
    "chat/tir": [f"{UNIT}tir"],
    "verl_bridge/agent_loop": [
        f"{STACK}agent_loop",
        f"{STACK}tir",
        f"{STACK}metrics",
        f"{STACK}certificate",
        f"{STACK}vision",
    ],
    "verl_bridge/trainer/verify": [f"{STACK}certificate", f"{STACK}invalid"],
    "verl_bridge/chat_setup": [
        f"{STACK}codec",
        f"{STACK}agent_loop",
        f"{STACK}families",
        f"{STACK}vision",
        "tests/properties/test_shown_schemas",
    ],
    "verl_bridge/verl_engine": [f"{UNIT}below_receipts", f"{STACK}agent_loop"],
    "verl_bridge/trainer/groups": [f"{STACK}invalid", f"{STACK}otc"],
    "verl_bridge/processors": [f"{STACK}vision_setup", f"{STACK}vision"],
    "verl_bridge/trainer/report": [f"{STACK}metrics", f"{STACK}otc"],
    "verl_bridge/trainer/otc": [f"{STACK}otc"],
    "verl_bridge/call_formats": [f"{STACK}formats", f"{STACK}agent_loop", f"{STACK}refusals"],
    "verl_bridge/startup/configuration": [
        f"{STACK}refusals",
        f"{STACK}tir::test_what_the_start_up_check_says",
        f"{STACK}tir::test_a_template_without_a_place_for_tools",
        f"{STACK}otc::test_settings_that_cannot_work",
        f"{STACK}metrics::test_settings_that_cannot_work",
        f"{STACK}certificate::test_cached_rollouts_are_refused_where_they_would_be_verified",
        f"{STACK}vision_setup::test_the_engine_resizes_as_the_trainer_does",
    ],
    "verl_bridge/startup/ray_cpus": [f"{STACK}refusals"],
    "verl_bridge/spmd": [f"{STACK}spmd"],
    "verl_bridge/rows": [f"{STACK}rows", f"{STACK}vision"],
    "verl_bridge/startup/scores": [f"{STACK}metrics", f"{STACK}otc"],
    "verl_bridge/slots": [f"{STACK}slots"],
    "verl_bridge/trainer/trainers": [f"{STACK}otc", f"{STACK}invalid"],
    "verl_bridge/trainer/updates": [f"{STACK}invalid"],
    "verl_bridge/trainer/void_turns": [f"{STACK}tir"],
}
# Changes that make no difference to Python, or that only a test of the exact number could see.
_NO_CHANGE = ("_Is", "_IsNot", "Is_Eq", "IsNot_NotEq", "Annotation", "VariableReplacer", "VariableInserter")


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str
    """Path of the module in the repository."""
    line: int
    what: str
    before: str
    """Lines that the change removes."""
    after: str
    """Lines that the change adds."""
    source: str
    """Source of the whole module with the change."""
    name: str


# The place in the source, the name of the change, and a function that returns the changed source (it takes a while).
Change = tuple[tuple[int, int], str, Callable[[], str]]


def changes(source: str) -> Iterator[Change]:
    """Yield all changes that can be made to a module."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    skipped = _annotations(tree)
    yield from _left_out(tree, lines)
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    parsed = get_ast(source)
    for name in sorted(operator_names()):
        if name.endswith(_NO_CHANGE):
            continue
        operator = get_operator(name)()
        places = [place for node in ast_nodes(parsed) for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            if not any(begin <= start < end for begin, end in skipped):
                yield start, name.removeprefix("core/"), partial(mutate_code, source, operator, occurrence)


def _annotations(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans of type annotations, which nothing evaluates."""
    nodes = []
    for node in ast.walk(tree):
        nodes += [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.targets[0], ast.Name):
            nodes.append(node.value if node.targets[0].id[0].isupper() else None)  # an alias of types
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if isinstance(node, ast.expr)
    ]


def _left_out(tree: ast.AST, lines: list[str]) -> Iterator[Change]:
    """Yield the changes that leave out a statement or a keyword argument."""
    for node in ast.walk(tree):
        plain = isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Return | ast.If)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if plain and not docstring:
            yield (node.lineno, node.col_offset), "StatementLeftOut", partial(_replaced, lines, node, "pass")
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            if keyword.arg:
                # `**{}` can stand where any argument can.
                left_out = partial(_replaced, lines, keyword, "**{}")
                yield (keyword.lineno, keyword.col_offset), "ArgumentLeftOut", left_out


def _replaced(lines: list[str], node: Any, text: str) -> str:
    first, last = node.lineno - 1, node.end_lineno - 1
    # The columns of `ast` count bytes.
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], before + text + after, *lines[last + 1 :]])


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants from the places of all modules, at most one mutant per place.

    A place is identified by its function, the text of its line and its column. So neither a change elsewhere in the
    code nor a move of the function to another module changes which mutants are drawn.

    Args:
        count: The most mutants to draw.
        seed: Seed of the draw.
    """
    drawn, met = [], Counter[str]()
    for name in COVERED:
        module = f"verl_multiturn/{name}.py"
        source = (ROOT / module).read_text(encoding="utf-8")
        lines, function_at = source.splitlines(), _functions(source)
        places: dict[tuple[int, int], list[Change]] = defaultdict(list)
        for change in changes(source):
            places[change[0]].append(change)
        for (line, column), here in sorted(places.items()):
            text = f"{seed} {function_at.get(line, '')} {lines[line - 1].strip()} {column}"
            met[text] += 1
            lot = hashlib.sha1(f"{text} {met[text]}".encode()).hexdigest()
            drawn.append((lot, module, here))
    drawn.sort(key=lambda each: each[0])
    return [_mutant(module, random.Random(lot).choice(here), lot[:8]) for lot, module, here in drawn[:count]]


def _functions(source: str) -> dict[int, str]:
    """Return the name of the innermost function or class around each line of a module; other lines have no entry."""
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef)
    ]
    nodes.sort(key=lambda node: node.lineno)
    return {line: node.name for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def _mutant(module: str, change: Change, lot: str) -> Mutant:
    (line, _), what, make = change
    mutated = make()
    lines = difflib.ndiff((ROOT / module).read_text(encoding="utf-8").splitlines(), mutated.splitlines())
    marked = [(text[:2], text[2:].strip()) for text in lines]
    before, after = ("\n".join(text for mark, text in marked if mark == sign) for sign in ("- ", "+ "))
    return Mutant(module, line, what, before, after, mutated, f"{what} {lot}")


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test files, or single tests, that cover a mutant's module, the most sensitive first."""
    name = mutant.module.removeprefix("verl_multiturn/").removesuffix(".py")
    return [f"{path}.py{colons}{test}" for path, colons, test in (each.partition("::") for each in COVERED[name])]


def state_of(mutant: Mutant, root: Path = ROOT) -> tuple[str, str]:
    """Return a digest of the definition that the mutant changes, and one of the tests that cover its module."""
    definition = definition_at((root / mutant.module).read_text(encoding="utf-8"), mutant.line)
    files = dict.fromkeys(test.partition("::")[0] for test in tests_of(mutant))
    tests = b"".join((root / path).read_bytes() for path in files)
    return hashlib.sha1(definition.encode()).hexdigest(), hashlib.sha1(tests).hexdigest()


def definition_at(source: str, line: int) -> str:
    """Return the top-level function, class or statement around a line, without its docstrings and comments."""
    for node in ast.parse(source).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if first <= line <= (node.end_lineno or 0):
            for inner in ast.walk(node):
                if isinstance(body := getattr(inner, "body", None), list):
                    inner.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
            return ast.dump(node)
    raise ValueError(f"there is nothing at line {line}")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(tree)
        code = 1
        try:
            import pytest

            ignored = "ignore::pytest.PytestAssertRewriteWarning"
            options = ["-x", "-q", "-p", "no:cacheprovider", "-W", ignored, "-m", "not engine"]
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

    This package and verl, which imports it, are left out: each mutant has to be imported anew.
    """
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    slow = "hypothesis pytest_asyncio pandas PIL.Image pydantic torch transformers typer"  # what most tests import
    slow += " ray tensordict transfer_queue datasets hydra peft wandb sglang fastapi uvicorn"  # what verl imports
    for name in slow.split():
        importlib.import_module(name)


def copy_tree(target: Path) -> None:
    """Copy the repository's files into a folder, tracked or not; those that git ignores are left out."""
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
            with tempfile.TemporaryDirectory() as folder:
                copy_tree(Path(folder) / "tree")
                while time.monotonic() < deadline and (taken := os.read(reading, 1)):
                    _examine_module(modules[taken[0]], Path(folder), found, deadline)
            os._exit(0)
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


def explained() -> dict[tuple[str, str], str]:
    """Return the reasons why survivors do not matter, by the lines before and after the change."""
    entries = yaml.safe_load(EXPLAINED.read_text(encoding="utf-8")) or [] if EXPLAINED.exists() else []
    return {(each["before"].strip(), each["after"].strip()): each["why"] for each in entries}


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
    open_ones = [m for m in survivors if (m.before.strip(), m.after.strip()) not in reasons]
    for mutant in open_ones:
        print(f"\nsurvived: {mutant.module}:{mutant.line} {mutant.what}\n- {mutant.before}\n+ {mutant.after}")
    counts = {name: sum(result == name for result in of.values()) for name in ("killed", "timeout", "not examined")}
    figures = {
        "mutants": len(drawn),
        "killed": counts["killed"] + counts["timeout"],
        "explained": len(survivors) - len(open_ones),
        "survived": len(open_ones),
        "not_examined": counts["not examined"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
