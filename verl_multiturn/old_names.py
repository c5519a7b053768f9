"""Import a module by the name that it had in version 0.1: until 2027-06-01, for code, YAML files and run folders.

`old_names.tsv` has a line for each module that has moved: the old name, a tab, the new name, both without the
package's own; and one for each documented class with another name: the old module, a colon and the old class, a tab,
the new class. Python asks here last, when nothing lies under a name. An import by an old name gives the module itself,
which has its old classes then, and a `FutureWarning` with the new name.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

UNTIL = "2027-06-01"
"""The day from which old names may go."""
_PACKAGE = __name__.rpartition(".")[0]
_FOLDER = Path(__file__).parent


@cache
def _lines() -> dict[str, str]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


@cache
def old_names() -> dict[str, str]:
    """Return the new name of each module that has moved, and of each package that is gone, by the old one."""
    return {f"{_PACKAGE}.{old}": f"{_PACKAGE}.{new}" for old, new in _lines().items() if ":" not in old}


def old_classes(module: str) -> dict[str, str]:
    """Return the new name of each documented class of a module, by the old one; the module has its old name, too."""
    places = {tuple(old.split(":")): new for old, new in _lines().items() if ":" in old}
    return {old: new for (place, old), new in places.items() if f"{_PACKAGE}.{place}" == module}


def name_of_today(name: str) -> str:
    """Return the name of today of a module, or of what is in one, as a user's configuration names it.

    Args:
        name: A dotted name, an old one or not; with or without `pkg://` before it.
    """
    scheme, separator, dotted = name.rpartition("://")
    place, dot, last = dotted.rpartition(".")
    names = old_names()
    now = names.get(dotted) or f"{names.get(place, place)}{dot}{last}"
    return f"{scheme}{separator}{now}"


def _file_of(new: str) -> str:
    return str(_FOLDER.joinpath(*new.split(".")[1:]).with_suffix(".py"))


class OldNames(MetaPathFinder, Loader):
    """Finds modules by the names that they had; the last one of `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has moved; None for every other name."""
        if not fullname.startswith(f"{_PACKAGE}.") or fullname not in old_names():
            return None
        if any(old.startswith(f"{fullname}.") for old in old_names()):
            # A package that is gone has no folder of its own, so that its modules are looked up here, too.
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self, origin=_file_of(old_names()[fullname]))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module that has moved, which `python -m` runs."""
        new = old_names()[fullname]
        _warn(fullname, new)
        return SourceFileLoader(new, _file_of(new)).get_code(new)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that has moved in the place of an empty one."""
        name = module.__name__
        new = old_names()[name]
        found = importlib.import_module(new)
        if hasattr(found, "__path__"):  # a package: its old modules must not be loaded from its folder once more
            module.__dict__.update({key: value for key, value in vars(found).items() if not key.startswith("__")})
            return
        _warn(name, new)
        for old, now in old_classes(name).items():
            setattr(found, old, getattr(found, now))
        # Another thread that imports it now may already have the empty one, and goes on with that.
        vars(module).update(vars(found))
        sys.modules[name] = found


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"the module {old!r} is now {new!r}; write that, since the old name is understood until {UNTIL} only",
        FutureWarning,
        stacklevel=3,  # who imports it
    )


def understand_old_names() -> None:
    """Have Python find modules by their old names, once in a process; `verl_multiturn/__init__.py` calls it."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
