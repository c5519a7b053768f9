"""The names of verl, SGLang, Ray and TransferQueue that our code uses, found in its syntax and in its classes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

PACKAGE = ROOT / "verl_multiturn"
FOREIGN = ("verl", "sglang", "ray", "transfer_queue")
Names = dict[str, set[str]]
"""Files by the name that they use."""


def files() -> list[Path]:
    """Return the files that may import verl, SGLang and Ray."""
    found = [path for room in ("verl_bridge", "cpu") for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [path for path in [*found, PACKAGE / "plugin.py"] if "stand_ins" not in path.parts]


def label(path: Path) -> str:
    """Return a file's name in the contract."""
    return str(path.relative_to(PACKAGE)).removeprefix("verl_bridge/")


def is_foreign(name: str | None) -> bool:
    """Return whether a module belongs to verl, SGLang, Ray or TransferQueue."""
    return (name or "").partition(".")[0] in FOREIGN


def imported() -> Names:
    """Return our files' imports, with the attributes that they read of it."""
    found: Names = defaultdict(set)
    for path in files():
        for name in _imported(ast.parse(path.read_text())):
            found[name].add(label(path))
    return found


def _imported(tree: ast.Module) -> set[str]:
    aliases: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    found.add(alias.name)
                    aliases[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and is_foreign(node.module):
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases and not chain[0].endswith("__"):
                found.add(".".join([aliases[inner.id], *reversed(chain)]))
    # `a.b` is named by `a.b.c` already.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _classes() -> Iterator[tuple[type, list[type], list[type]]]:
    """Yield our classes with foreign bases: the class, its own part of the bases, and the foreign part."""
    for path in files():
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for cls in vars(importlib.import_module(dotted)).values():
            cls = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)
            if inspect.isclass(cls) and cls.__module__ == dotted:
                own = [each for each in cls.__mro__ if each.__module__.startswith("verl_multiturn")]
                foreign = [each for each in cls.__mro__ if is_foreign(each.__module__)]
                if foreign:
                    yield cls, own, foreign


def inherited() -> tuple[Names, set[str]]:
    """Return the names of foreign bases that our classes use, and those that they override without taking more."""
    found: Names = defaultdict(set)
    exact: set[str] = set()
    for _, own, foreign in _classes():
        used: Names = defaultdict(set)
        for each in own:
            file = label(Path(inspect.getfile(each)))
            source = inspect.getsource(each)
            names = {*re.findall(r"\bself\.(\w+)", source), *re.findall(r"\bsuper\(\)\.(\w+)", source)}
            names |= {*vars(each), *vars(each).get("__annotations__", {})} & set(re.findall(r"\w+", source))
            for name in names:
                if not name.startswith("__") or name == "__init__":
                    used[name].add(file)
        for name, users in used.items():
            if (definer := _definer(foreign, name)) is None:
                continue
            whole = f"{path_of(definer)}.{name}"
            found[whole] |= users
            override = next((vars(each)[name] for each in own if name in vars(each)), None)
            if inspect.isfunction(override) and not _takes_more(override):
                exact.add(whole)
    return found, exact


def path_of(cls: type) -> str:
    """Return the name by which a class is found; Ray hides the class of an actor."""
    name = cls.__name__ if "<locals>" in cls.__qualname__ else cls.__qualname__
    inner = getattr(importlib.import_module(cls.__module__), name, None)
    return f"{cls.__module__}.{name}{'.__ray_metadata__.modified_class' if hasattr(inner, '__ray_metadata__') else ''}"


def _definer(foreign: list[type], name: str) -> type | None:
    from verl_multiturn.verl_bridge.compat.contract import _assigned

    for each in foreign:
        if name in vars(each) or name in vars(each).get("__annotations__", {}):
            return each
    return next((each for each in foreign if name in _assigned(each)), None)


def _takes_more(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def private() -> Names:
    """Return private attributes that our files read, and that nothing in our package defines."""
    read: Names = defaultdict(set)
    defined: set[str] = set()
    ours = set(files())
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                if isinstance(node.ctx, ast.Store) and is_own:
                    defined.add(node.attr)
                elif path in ours:
                    read[node.attr].add(label(path))
    return {name: users for name, users in read.items() if name not in defined | {"_exit"}}  # of the module `os`


def lines_found() -> dict[str, str]:
    """Return the contract's line for each name that our code uses, without those of `private`."""
    from verl_multiturn.verl_bridge.compat.contract import EXACT, describe, read

    found, exact = inherited()
    moved = {name for line in read() for name in line.names if len(line.names) > 1}
    for name, users in imported().items():
        if name not in moved:  # here, it is in one of its places alone
            found.setdefault(name, set()).update(users)
    lines = {}
    for name, users in sorted(found.items()):
        kind, parameters = describe(name)
        lines[name] = "\t".join((name, kind + (EXACT if name in exact else ""), parameters, ", ".join(sorted(users))))
    return lines


@functools.cache
def _texts() -> dict[str, str]:
    """Return the texts of our files."""
    return {label(path): path.read_text() for path in files()}


def is_used(name: str, needed_by: str) -> bool:
    """Return whether the last part of a name is in each of the files that need it; verl's own are not looked at."""
    word = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
    return all(word.search(_texts().get(file, "")) for file in needed_by.split(", ") if not file.startswith("verl's "))


def needed_now(name: str, needed_by: str) -> str:
    """Return the files that need a name, those in the place of files that have moved among them; "" without any."""
    word = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
    listed = needed_by.split(", ")
    still = [file for file in listed if file.startswith("verl's ") or word.search(_texts().get(file, ""))]
    if any(file not in _texts() and not file.startswith("verl's ") for file in listed):
        still += [file for file, text in _texts().items() if file not in still and word.search(text)]
    return ", ".join(still)


def written_anew() -> str:
    """Return the whole table: the names found, and the lines that were added by hand and are still in our code."""
    from verl_multiturn.verl_bridge.compat.contract import EXACT, TABLE, check, read

    found = lines_found()
    text = TABLE.read_text() if TABLE.exists() else ""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    kept: dict[str, str] = {}
    for line in read():
        if line.name in found:
            name, kind, _, users = found[line.name].split("\t")
            if not check([line]) and line.kind.endswith(EXACT) == kind.endswith(
                EXACT
            ):  # it may know of other sets, too
                found[name] = "\t".join((name, line.kind, line.parameters, users))
        elif users := needed_now(line.word, line.needed_by) or ("|" in line.name and line.needed_by):
            kept[f"{line.name} {line.parameters}"] = "\t".join((line.name, line.kind, line.parameters, users))
    return "\n".join([*comments, *sorted([*found.values(), *kept.values()])]) + "\n"


if __name__ == "__main__":
    import verl  # noqa: F401

    from verl_multiturn.verl_bridge.compat.contract import TABLE

    TABLE.write_text(written_anew())
