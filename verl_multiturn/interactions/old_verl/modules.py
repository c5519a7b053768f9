"""The modules of `verl.interactions`, for a verl that has none: `from verl.interactions.base import BaseInteraction`.

Invariants:
- verl is not imported to see whether it has them: the finder comes last, so that it is called only when verl has none;
- the classes are those of `classes.py`, whichever name they were imported by.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "verl.interactions"
_CLASSES = "verl_multiturn.interactions.old_verl.classes"
# Names of each module by the module of ours that has them; a package has none.
_NAMES: dict[str, tuple[str, tuple[str, ...]] | None] = {
    PACKAGE: None,
    f"{PACKAGE}.base": (_CLASSES, ("BaseInteraction",)),
    f"{PACKAGE}.gsm8k_interaction": (_CLASSES, ("BaseInteraction", "Gsm8kInteraction")),
    f"{PACKAGE}.weather_interaction": (_CLASSES, ("BaseInteraction", "WeatherInteraction")),
    f"{PACKAGE}.utils": None,
    f"{PACKAGE}.utils.interaction_registry": (
        "verl_multiturn.interactions.old_verl.registry",
        ("get_interaction_class", "initialize_interactions_from_config"),
    ),
}


class OldModules(MetaPathFinder, Loader):
    """Finder and loader of the modules of `verl.interactions`. It is the last finder of all."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that no other finder has found; None for any other module.

        Args:
            fullname: Name of the module.
            path: Not used.
            target: Not used.
        """
        if fullname not in _NAMES:
            return None
        if fullname != PACKAGE:  # a verl that has the package has other classes: the two must not be mixed
            package = sys.modules.get(PACKAGE)
            if package is None or not _is_ours(package):
                return None
        return ModuleSpec(fullname, self, is_package=_NAMES[fullname] is None)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to Python to make the module.

        Args:
            spec: The module's spec.
        """
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its names.

        Args:
            module: The module.
        """
        module.__doc__ = f"`{module.__name__}` of verl 0.4 to 0.6, from verl-multiturn."
        if (names := _NAMES[module.__name__]) is not None:
            ours = importlib.import_module(names[0])
            for name in names[1]:
                setattr(module, name, getattr(ours, name))


def _is_ours(module: ModuleType) -> bool:
    return isinstance(getattr(module.__spec__, "loader", None), OldModules)


def ours(name: Any) -> Any:
    """Return the dotted name by which a class of `verl.interactions` is ours; any other name as it is.

    So a YAML file can be read without importing verl, and where there is no verl at all.

    Args:
        name: A dotted name, or whatever an author wrote in its place.
    """
    module, _, attribute = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    names = _NAMES.get(module)
    if names is None or attribute not in names[1] or _verl_has_them():
        return name
    return f"{names[0]}.{attribute}"


def _verl_has_them() -> bool:
    if (package := sys.modules.get(PACKAGE)) is not None:
        return not _is_ours(package)
    verl = importlib.util.find_spec("verl")  # a package at the top is found without being imported
    folders = [] if verl is None else verl.submodule_search_locations or []
    return any((Path(folder) / "interactions").is_dir() for folder in folders)


def install() -> None:
    """Let Python find the modules in this process, if nothing else provides them. Once is enough."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
