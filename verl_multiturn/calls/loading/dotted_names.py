"""Objects of authors by name: `package.module.name`, `path/to/file.py:name`, or a reference `package/name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import zlib
from pathlib import Path
from typing import Any

from verl_multiturn.calls.loading.entry_points import is_reference, load_entry
from verl_multiturn.describe import describe, did_you_mean, place_of, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import at_home

_NEAR = 0.8
"""difflib's ratio of a module's name that may have been meant, among all that can be imported."""


def resolve_class(name: Any, where: str, group: str = "") -> Any:
    """Return the class that a dotted name or a reference means.

    Args:
        name: The name, `package.module.Class`, or a reference as in `resolve`.
        where: The place that errors name, for example `tools.yaml: tools[0].class_name`.
        group: As in `resolve`.

    Raises:
        ConfigError: The module cannot be imported, or has no such class.
    """
    found = resolve(name, where, group)
    if not isinstance(found, type):
        if is_reference(name):
            raise ConfigError(f"{where}: expected a class, but {name!r} is {show(found, 100)}; name another one")
        module_name, _, class_name = name.rpartition(".")
        raise ConfigError(f"{where}: {module_name!r} has no class {class_name!r}, only {show(found, 100)}")
    return found


def resolve(name: Any, where: str, group: str = "") -> Any:
    """Return the object that a dotted name means, or a reference to an entry point of an installed package.

    Args:
        name: The name, `package.module.name`; or, in a place that has a group, `package/name`.
        where: The place that errors name, for example `tools.yaml: tools[0].function`.
        group: The group of entry points whose references the place takes, one of `entry_points.GROUPS`; "" for none.

    Raises:
        ConfigError: The module cannot be imported, or has no such name; or the reference means nothing, see
            `load_entry`.
    """
    if group and is_reference(name):
        return load_entry(name, group, where)
    module_name, _, attribute = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module_name:
        raise ConfigError(f"{where}: {name!r} is no dotted name; write it as 'package.module.name'")
    module = import_module(module_name, where)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module)) or "correct the name, or define it there"
        raise ConfigError(f"{where}: {module_name!r} has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def resolve_place(name: Any, where: str, group: str) -> Any:
    """Return the object that a place means: `package.module:name`, `path/to/file.py:name`, or a reference.

    A file is imported once in a process, whatever its folder; its module can be imported by no other name.

    Args:
        name: The place.
        where: The setting that errors name.
        group: The group of entry points whose references the setting takes, as in `resolve`.

    Raises:
        ConfigError: It has another form, it cannot be imported, or it has no such name.
    """
    if is_reference(name):
        return load_entry(name, group, where)
    place, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    is_file = place.endswith(".py")
    if not (colon and attribute.isidentifier() and (is_file or all(map(str.isidentifier, place.split("."))))):
        raise ConfigError(
            f"{where}: {name!r}: expected 'package.module:function' or 'path/to/file.py:function', or for an "
            "installed package's 'package/name'; write it so"
        )
    if not is_file:
        return resolve(f"{place}.{attribute}", where)
    module = _import_file(Path(str(at_home(place))), where)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module)) or "correct the name, or define it there"
        raise ConfigError(f"{where}: {place!r} has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def _import_file(path: Path, where: str) -> Any:
    whole = path.resolve()
    name = f"{whole.stem}_{zlib.crc32(os.fsencode(whole)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    if not whole.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"{where}: there is no file {str(path)!r}; correct the path, or start in the folder it begins from"
        )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # an author's file may raise anything at import
        del sys.modules[name]
        raise ConfigError(
            f"{where}: cannot import {str(path)!r} ({describe(error)}); mend it, or install its requirements"
        ) from error
    return module


def import_module(name: str, where: str) -> Any:
    """Import an author's module, and return it.

    Args:
        name: Its dotted name.
        where: The place that errors name, as in `resolve`.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # an author's module may raise anything at import
        hint = _near_module(name) if isinstance(error, ModuleNotFoundError) and error.name == name else ""
        raise ConfigError(
            f"{where}: cannot import {name!r} ({describe(error)}{place_of(error)}); {hint and f'{hint} Otherwise '}"
            "install it, set PYTHONPATH, or start in the folder where it lies"
        ) from error


def _near_module(name: str) -> str:
    """Return the question whether a module that can be imported was meant; "" if none has a name like it."""
    folder, _, last = name.rpartition(".")
    try:
        places = list(sys.modules[folder].__path__) if folder else None
        known = [each.name for each in pkgutil.iter_modules(places) if not each.name.startswith("_")]
    except Exception:  # a path hook or a package is somebody's code
        return ""
    near = difflib.get_close_matches(last, known, n=1, cutoff=_NEAR)
    return did_you_mean(last, near)
