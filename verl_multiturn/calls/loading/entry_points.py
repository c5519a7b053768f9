"""Objects of installed packages, by the entry points that the packages declare.

    # pyproject.toml of the package my-tools
    [project.entry-points."verl_multiturn.tools"]
    lookup = "my_tools.lookup:Lookup"              # its reference is my-tools/lookup, and my_tools/lookup, too

A reference is `package/name`, compared as package names are: `-`, `_`, `.` and letter case of the part before the
slash make no difference. An entry point whose own name has a slash already is referred to by that name.

Invariants:
- a package is imported when one of its references is used, and not before: lists and checks read its metadata alone;
- a reference means one object: where two packages give it, its use is an error that names both;
- of two packages of one name the one that comes first in `sys.path` counts, as it does for `import`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.describe import describe, did_you_mean, place_of
from verl_multiturn.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUPS = ("tools", "rewards", "interactions", "advantages", "recipes")
"""Entry-point groups, each below `verl_multiturn.`."""
FOLDERS = "recipes"
"""The group whose entry points name a folder of a package; those of the others name an object in a module."""
_PREFIX = "verl_multiturn."
_REFERENCE = re.compile(r"[\w.-]+/[\w.-]+")
_OBJECT = re.compile(r"(?P<module>\w+(?:\.\w+)*)\s*(?::\s*(?P<attribute>\w+(?:\.\w+)*)\s*)?(?:\[.*\])?")
_RUNS = re.compile(r"[-_.]+")
_MOST_KNOWN = 12
"""References that an error lists."""


@dataclass(frozen=True)
class InstalledEntry:
    """One entry point of an installed package.

    Attributes:
        group: One of `GROUPS`.
        name: Its reference, with the package's own spelling, for example `my-tools/lookup`.
        package: Name of the package.
        version: Version of the package.
        value: The object that the package declares, `module:name`; of a recipe the folder, as `package.folder`.
        place: The folder in which the package's metadata lies.
        fault: Reason for which it cannot be used, as far as the metadata shows; "" without one.
    """

    group: str
    name: str
    package: str
    version: str
    value: str
    place: str
    fault: str = ""

    @property
    def source(self) -> str:
        """The package with its version, as errors name it."""
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class InstalledEntries:
    """All entry points of this package's groups.

    Attributes:
        entries: Those that a reference may mean, in the order of their packages; two of one name both have a fault.
        faults: Sentences about metadata of which no reference can be made.
    """

    entries: tuple[InstalledEntry, ...]
    faults: tuple[str, ...]


def is_reference(text: Any) -> bool:
    """Return whether a text has the form `package/name`, which neither `module:name` nor `path/file.py:name` has."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def installed_entries() -> InstalledEntries:
    """Return the entry points of all packages that this process can import, for lists and `doctor`."""
    return _read(tuple(sys.path))


def installed_entry(reference: str, group: str, where: str) -> InstalledEntry:
    """Return the entry point that a reference means, without importing anything of its package.

    Args:
        reference: The reference, `package/name`.
        group: One of `GROUPS`.
        where: The place that errors name, for example `tools.yaml: tools[0].tool`.

    Raises:
        ConfigError: No package gives it, two do, or the package declares no usable object.
    """
    everything = installed_entries()
    found = [entry for entry in everything.entries if _key(entry.name) == _key(reference)]
    entry = next((each for each in found if each.group == group), None)
    if entry is None:
        raise ConfigError(f"{where}: {_unknown(reference, group, everything, [each.group for each in found])}")
    if entry.fault:
        raise ConfigError(f"{where}: {reference!r}: {entry.fault}")
    return entry


def load_entry(reference: str, group: str, where: str) -> Any:
    """Import the object that a reference means, and return it.

    Args:
        reference: As for `installed_entry`.
        group: As for `installed_entry`; not `recipes`, which are folders.
        where: As for `installed_entry`.

    Raises:
        ConfigError: As for `installed_entry`; or the module cannot be imported, or lacks the name.
    """
    entry = installed_entry(reference, group, where)
    module, attribute = load_place(entry)
    at = f"{where}: {reference!r} of {entry.source} ({entry.value})"
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # an author's module may raise anything at import
        is_gone = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
        remedy = (
            f"the metadata in {entry.place} may be older than the package's files: install {entry.package} again"
            if is_gone
            else f"mend {entry.package}, or install the packages that it needs"
        )
        raise ConfigError(f"{at} cannot be imported: {describe(error)}{place_of(error)}; {remedy}") from error
    try:
        return operator.attrgetter(attribute)(imported)
    except AttributeError:
        hint = did_you_mean(attribute, vars(imported)) or f"install {entry.package} again if its files are newer"
        raise ConfigError(f"{at}: the module {module!r} has no {attribute!r}; {hint}") from None


def load_place(entry: InstalledEntry) -> tuple[str, str]:
    """Return the module and the name within it that an entry point declares; the name of a recipe is empty."""
    module, _, attribute = _parts(entry.value)
    return module, attribute


def folder_of(reference: str, where: str) -> Path:
    """Return the folder of a recipe, without importing anything of its package.

    Args:
        reference: The recipe's reference.
        where: As for `installed_entry`.

    Raises:
        ConfigError: As for `installed_entry`; or the package has no such folder.
    """
    entry = installed_entry(reference, FOLDERS, where)
    top, *rest = _parts(entry.value)[0].split(".")
    try:
        spec = importlib.util.find_spec(top)  # of a name without a dot: nothing is imported
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (folder := Path(place, *rest)).is_dir():
            return folder
    raise ConfigError(
        f"{where}: {reference!r} of {entry.source}: no folder {entry.value!r} is installed; list its files as the "
        f"package's data, and install {entry.package} again"
    )


def _unknown(reference: str, group: str, everything: InstalledEntries, others: Sequence[str]) -> str:
    known = [entry.name for entry in everything.entries if entry.group == group]
    if others:
        why = f"{reference!r} belongs to {_PREFIX}{others[0]}, and not to {_PREFIX}{group}; "
        return why + (f"known are {', '.join(known[:_MOST_KNOWN])}" if known else "name one of this kind")
    nearest = did_you_mean(reference, known) or (known and f"known are {', '.join(known[:_MOST_KNOWN])}")
    hint = nearest or "install the package in this Python, and see `verl-multiturn doctor`"
    again = " (an entry point that was added to a package is known once the package is installed again)"
    faults = "".join(f"; {fault}" for fault in everything.faults)
    return f"no installed package gives {reference!r} in {_PREFIX}{group}; {hint}{again}{faults}"


def _parts(value: str) -> tuple[str, str, str]:
    """Return module, `:` or "", and name of an entry point's value; three empty texts where it has another form."""
    found = _OBJECT.fullmatch(value)
    if found is None:
        return "", "", ""
    attribute = found["attribute"] or ""
    return found["module"], ":" if attribute else "", attribute


def is_same_reference(one: str, other: str) -> bool:
    """Return whether two references name one entry point, however each spells its package."""
    return _key(one) == _key(other)


def _plain(name: str) -> str:
    """Return a package's name in the one spelling by which names are compared (PEP 503)."""
    return _RUNS.sub("-", name).lower()


def _key(reference: str) -> str:
    package, _, name = reference.partition("/")
    return f"{_plain(package)}/{name}"


@functools.lru_cache(maxsize=8)
def _read(path: tuple[str, ...]) -> InstalledEntries:
    """Return the entry points of the packages in the folders of `sys.path`, which a process reads once."""
    import importlib.metadata  # most commands need none of it, and it takes a moment

    entries: list[InstalledEntry] = []
    faults: list[str] = []
    for package, rivals in _declaring(importlib.metadata.distributions(path=list(path)), faults).items():
        present = [each for each in importlib.metadata.distributions(name=package, path=list(path)) if _is_whole(each)]
        first = [each for each in present if present and _place(each) == _place(present[0])]
        if len(versions := sorted({str(each.version) for each in first})) > 1:
            faults.append(
                f"{_place(present[0])} has the package {package} in {len(versions)} versions ({', '.join(versions)}): "
                f"remove the rest of the older one, or install {package} again"
            )
        chosen = {_place(each) for each in first}
        found = {_folder(each) for each in present}
        for distribution, text in rivals:
            if _is_whole(distribution) and _folder(distribution) not in found:
                faults.append(
                    f"{_folder(distribution)} is the package {_name(distribution)} by its METADATA, so that no look-up "
                    "by either name finds it; install it again, or mend the program that built it"
                )
            elif _place(distribution) in chosen and _is_whole(distribution):
                entries += _entries_of(distribution, text, faults)
    unique = list(dict.fromkeys(entries))  # a folder may be in `sys.path` twice
    return InstalledEntries(tuple(_with_rivals(unique)), tuple(dict.fromkeys(faults)))


def _declaring(found: Any, faults: list[str]) -> dict[str, list[tuple[Distribution, str]]]:
    """Return the packages that declare something for this one by name, each with the text of `entry_points.txt`."""
    declaring: dict[str, list[tuple[Distribution, str]]] = {}
    for distribution in found:
        file = "entry_points.txt"
        try:
            text = distribution.read_text(file) or ""
            if re.search(r"(?im)^\s*\[\s*verl[-_.]multiturn[-_.]", text):
                file = "METADATA"
                declaring.setdefault(_plain(_name(distribution)), []).append((distribution, text))
        except (OSError, ValueError) as error:  # of any package
            faults.append(f"{file} of a package in {_place(distribution)} cannot be read ({describe(error)})")
    return declaring


def _name(distribution: Distribution) -> str:
    """Return the name of a package: of its metadata, or of the folder of a broken install."""
    metadata: Any = distribution.metadata  # None in later versions of Python, where the file is not there
    named = metadata["Name"] if metadata is not None else None
    return str(named or Path(getattr(distribution, "_path", "unnamed")).name.partition("-")[0])


def _is_whole(distribution: Distribution) -> bool:
    """Return whether a package has metadata: an upgrade may leave an empty folder of an old version behind."""
    try:
        metadata: Any = distribution.metadata
    except (OSError, ValueError):  # `_declaring` reports it
        return False
    return metadata is not None and metadata["Name"] is not None


def _place(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))


def _folder(distribution: Distribution) -> str:
    """Return the folder of a package's metadata, whose name the look-up by name goes by."""
    return str(getattr(distribution, "_path", _place(distribution)))


def _entries_of(distribution: Distribution, text: str, faults: list[str]) -> Iterator[InstalledEntry]:
    package, version = _name(distribution), distribution.version or "without a version"
    for group, line in _lines(text):
        where = f"{package} {version}: [{group}] {line!r}"
        name, equals, value = (part.strip() for part in line.partition("="))
        short = group.removeprefix(_PREFIX)
        if short not in GROUPS:
            known = [f"{_PREFIX}{each}" for each in GROUPS]
            faults.append(f"{where}: no such group; {did_you_mean(group, known) or f'known are {known}'}")
            continue
        full = name if "/" in name else f"{package}/{name}"
        if not equals or not is_reference(full):
            faults.append(f"{where}: expected name = module:name, the name of letters, digits, '.', '-' and '_'")
            continue
        module, colon, _ = _parts(value)
        fault = ""
        if not module or bool(colon) == (short == FOLDERS):
            form = "package.folder" if short == FOLDERS else "module:name"
            fault = f"{package} {version} declares {value!r}; expected {form}; mend its entry point"
        yield InstalledEntry(short, full, package, version, value, _place(distribution), fault)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Return the lines of this package's groups, each with its group; the other groups are not our business."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif line and line[0] not in "#;" and _plain(group).startswith(_plain(_PREFIX)):
            yield group, line


def _with_rivals(entries: Sequence[InstalledEntry]) -> Iterator[InstalledEntry]:
    """Return the entry points, each one whose reference has two meanings with a fault that names all of them."""
    meanings: dict[tuple[str, str], list[InstalledEntry]] = {}
    for entry in entries:
        meanings.setdefault((entry.group, _key(entry.name)), []).append(entry)
    for entry in entries:
        rivals = meanings[entry.group, _key(entry.name)]
        if len({(each.package, each.value) for each in rivals}) > 1:
            named = " and ".join(dict.fromkeys(f"{each.source} ({each.value})" for each in rivals))
            entry = replace(entry, fault=f"{named} both give it; remove one of them")
        yield entry
