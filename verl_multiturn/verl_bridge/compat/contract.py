"""The contract: all names of verl, SGLang and Ray that this package uses, and a check that they are there.

`contract.tsv` has a line for each name: the name, its kind, its parameters, and the files that need it. A test compares
it with the code in both directions; `verl-multiturn doctor` checks it, and so does the start of a run whose versions
are in no supported set. The names are looked up in the installed packages; nothing is started.

    python -m verl_multiturn.verl_bridge.compat.contract            # check, in some 15 s; status 1: one is missing
    python -m verl_multiturn.verl_bridge.compat.contract NAME …     # print lines for the table

A name that moved has its places with `|` between them, the first one that is there counts. A kind may have
alternatives, too. Kinds:

    module, class, function, async function, method, async method, property
    value        anything else that a module or class has
    attribute    an instance's: assigned to `self`, or declared in the class
    dataclass    a class whose fields some code reads
    text         a text that is in a module: NAME is the module, the parameters are the text
    source       a class or function that ours replaces: NAME is its module, the parameters are its name there
                 and, behind an `=`, the digest of its source without comments, docstring and spaces

Parameters are names; `=` behind one says that it has a default. A name fits as long as it can be called in the same
way: a new parameter needs a default, and those behind a `*` may be anywhere. Behind a kind, `!` says that a method
of ours overrides this one and would not take a new parameter, so that there may be none.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import itertools
import re
import sys
import textwrap
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import verl  # noqa: F401  # first: it loads the plugin, which makes SGLang importable on a CPU

TABLE = Path(__file__).with_name("contract.tsv")
EXACT = "!"
_PACKAGES = {"transfer_queue": "TransferQueue"}


@dataclass(frozen=True)
class ContractLine:
    """A line of the contract."""

    name: str
    """Dotted names with `|` between them."""
    kind: str
    parameters: str
    """Parameters with `, ` between them; empty where there are none to compare."""
    needed_by: str
    """The files that need it, relative to `verl_multiturn/` without its first folder, with `, ` between them."""

    @property
    def names(self) -> list[str]:
        """The places where the name may be."""
        return self.name.split("|")

    @property
    def word(self) -> str:
        """Part after the last dot, as it is in the files that need it."""
        return self.parameters.partition("=")[0] if self.kind in _OF_MODULES else self.names[0]


def read() -> list[ContractLine]:
    """Return the contract's lines."""
    lines = (text.split("\t") for text in TABLE.read_text(encoding="utf-8").splitlines() if not text.startswith("#"))
    return [ContractLine(*line) for line in lines]


def check(lines: list[ContractLine] | None = None) -> list[str]:
    """Compare the contract with the installed packages.

    Args:
        lines: The contract; by default the table of this folder.

    Returns:
        A sentence for each name that is missing or has changed; none where the contract holds.
    """
    return [fault for line in (read() if lines is None else lines) if (fault := _fault(line))]


def describe(name: str) -> tuple[str, str]:
    """Return kind and parameters of a foreign name as the contract has them.

    Raises:
        LookupError: There is no such name.
        Exception: The module's import raised it.
    """
    owner, value = _find(name)
    last = name.rpartition(".")[2]
    if value is _ATTRIBUTE:
        return "attribute", ""
    if isinstance(value, ModuleType):
        return "module", ""
    if isinstance(value, property):
        return "property", ""
    if inspect.isclass(value):
        return "class", _parameters(value)
    if not callable(value):
        return "value", ""
    kind = "method" if inspect.isclass(owner) else "function"
    static = inspect.getattr_static(owner, last, None) if inspect.isclass(owner) else None
    if isinstance(static, staticmethod | classmethod):
        value = static.__func__
    return f"{'async ' if inspect.iscoroutinefunction(value) else ''}{kind}", _parameters(value)


def _fault(line: ContractLine) -> str:
    """Return the fault of a line's name; empty where there is none."""
    if line.kind in _OF_MODULES:
        return _OF_MODULES[line.kind](line)
    said = ""
    for name in line.names:
        try:
            kind, parameters = describe(name)
            break
        except LookupError:
            continue
        except Exception as error:  # whatever a foreign module raises while it is imported
            said = said or f"{_version(name)}: {_short(name)} cannot be imported ({type(error).__name__}: {error})"
    else:
        return _needs(line, said or f"{_version(line.name)} has no {_short(line.names[0])}")
    subject = f"{_version(name)}'s {_short(name)}"
    kinds = line.kind.removesuffix(EXACT).split("|")
    if kinds == ["dataclass"]:
        if dataclasses.is_dataclass(_find(name)[1]):
            return ""
        return _needs(line, f"{subject} is no dataclass any more")
    if kind not in kinds:
        return _needs(line, f"{subject} is of the kind {kind!r}, not {' or '.join(map(repr, kinds))}")
    if line.parameters and not _fits(line.parameters, parameters, exact=line.kind.endswith(EXACT)):
        return _needs(line, f"{subject} takes ({parameters}), not ({line.parameters})")
    return ""


def _needs(line: ContractLine, fault: str) -> str:
    return f"{fault}, which {line.needed_by} {'need' if ', ' in line.needed_by else 'needs'}"


def _fault_of_text(line: ContractLine) -> str:
    for name in line.names:
        try:
            if line.parameters in inspect.getsource(_find(name)[1]):
                return ""
        except Exception:  # whatever a foreign module raises while it is imported: the text is not there
            continue
    return _needs(line, f"{_version(line.name)} has no {line.parameters!r} in {line.names[0]}")


def _fault_of_source(line: ContractLine) -> str:
    inner, _, digest = line.parameters.partition("=")
    name = f"{line.names[0]}.{inner}"
    try:
        found = digest_of(name)
    except Exception:  # as above
        return _needs(line, f"{_version(name)} has no {inner} in {line.names[0]}")
    if found == digest:
        return ""
    changed = f"{_version(name)}'s {inner} is another one ({found}, not {digest}): look what has changed in it"
    return _needs(line, changed)


def digest_of(name: str) -> str:
    """Return the digest of a class's or function's source, which comments, a docstring and spaces do not change."""
    source = textwrap.dedent(inspect.getsource(_find(name)[1]))
    node = ast.parse(source).body[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        first = node.body[0]
        lines = source.splitlines()
        source = "\n".join([*lines[: first.lineno - 1], *lines[first.end_lineno :]])
    words = tokenize.generate_tokens(io.StringIO(source).readline)
    said = "".join(word.string for word in words if word.type != tokenize.COMMENT)
    return hashlib.sha256("".join(said.split()).encode()).hexdigest()[:16]


_OF_MODULES = {"text": _fault_of_text, "source": _fault_of_source}
"""Kinds whose name is a module."""


def _version(name: str) -> str:
    """Return the distribution of a name and its version, as `verl 0.9.1`."""
    package = name.partition(".")[0]
    try:
        return f"{package} {importlib.metadata.version(_PACKAGES.get(package, package))}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


def _short(name: str) -> str:
    """Return the class and its attribute where a name is one, else the whole name."""
    first = next((i for i, part in enumerate(name.split(".")) if part.lstrip("_")[:1].isupper()), 0)
    return ".".join(name.split(".")[first:])


_ATTRIBUTE = object()


def _find(name: str) -> tuple[Any, Any]:
    """Return the owner of a name, and the object; `_ATTRIBUTE` for an attribute of instances alone.

    Raises:
        LookupError: There is no such name.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            # Another module is missing: the requested one is there, and cannot be imported.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
    else:
        raise LookupError(name)
    owner = None
    for i, part in enumerate(parts[count:], count + 1):
        owner = found
        try:
            static = inspect.getattr_static(owner, part, None) if inspect.isclass(owner) else None
            found = static if isinstance(static, property) else getattr(owner, part)
        except AttributeError:
            if i == len(parts) and inspect.isclass(owner) and assigns(owner, part):
                return owner, _ATTRIBUTE
            raise LookupError(name) from None
    return owner, found


def assigns(cls: type, name: str) -> bool:
    """Return whether instances of a class have an attribute, by the sources of the class and its bases."""
    return any(name in getattr(each, "__annotations__", {}) or name in _assigned(each) for each in cls.__mro__)


@cache
def _assigned(cls: type) -> frozenset[str]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return frozenset()
    # Also those of `self.a, self.b, *_ = …`.
    lines = re.findall(r"^ +((?:self\.\w+(?:: [^=\n]+)?|\*?_+)(?:, (?:self\.\w+|\*?_+))*) =(?!=)", source, re.MULTILINE)
    return frozenset(itertools.chain.from_iterable(re.findall(r"self\.(\w+)", line) for line in lines))


def _parameters(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # C code, or a class without one
        return ""
    written, is_named = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            written.append("*")
        is_named = is_named or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
        default = "" if parameter.default is parameter.empty else "="
        written.append(f"{stars}{parameter.name}{default}")
    return ", ".join(written)


def _fits(recorded: str, found: str, *, exact: bool) -> bool:
    """Return whether a callable can be called as before.

    Args:
        recorded: Its parameters in the contract.
        found: Its parameters now.
        exact: Whether it may have no new parameter.
    """
    (places, names), (new_places, new_names) = _split(recorded), _split(found)
    given, new = {**dict(places), **names}, {**dict(new_places), **new_names}
    if "*args" not in given and [name for name, _ in new_places[: len(places)]] != [name for name, _ in places]:
        return False
    if any(name not in new or (optional and not new[name]) for name, optional in given.items()):
        return False
    added = {name: optional for name, optional in new.items() if name not in given}
    return not added if exact else all(added.values())


def _split(parameters: str) -> tuple[list[tuple[str, bool]], dict[str, bool]]:
    """Return the positional parameters, then the others by name, each with whether it may be omitted."""
    places: list[tuple[str, bool]] = []
    names: dict[str, bool] = {}
    is_place = True
    for parameter in filter(None, parameters.split(", ")):
        name, optional = parameter.removesuffix("="), parameter.endswith("=") or parameter.startswith("*")
        is_place = is_place and not parameter.startswith("*")
        if is_place:
            places.append((name, optional))
        elif name != "*":
            names[name] = optional
    return places, names


def main(names: list[str]) -> int:
    """Check the contract and print its faults, or print the lines of names; return the exit status."""
    for name in names:
        kind, parameters = describe(name)
        print("\t".join((name, kind, parameters, "FILE")))
    if names:
        return 0
    faults = check()
    for fault in faults:
        print(fault)
    print(f"{len(read())} names, {len(faults)} missing or changed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
