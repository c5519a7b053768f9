"""Loading of authors' objects from a YAML file, which lists their classes with settings and limits.

tools:                                      `ListFile.key`
- class_name: my_package.search.Search    an entry; `resolve_class` finds the class
config: {top_k: 3}                      `construct` makes the object
limits: {timeout_s: 20}                 `set_limits` (`calls/limits.py`) stores its limits
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.calls.entry_points import is_reference, load_entry
from verl_multiturn.describe import describe, did_you_mean, message_of, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import at_home
from verl_multiturn.rows.files import read_text


@dataclass(frozen=True)
class ListFile:
    """A kind of YAML file that lists authors' objects."""

    setting: str
    """Name of the setting that gives the file's path."""
    key: str
    """The one key of the file, with the list of entries."""
    remedy: str
    """Remedy where there is no such file."""
    name: str
    """Word for the name of an object."""
    rename: str
    """Remedy where two objects have one name."""

    def load(self, path: str | Path, build: Callable[[Any, str], Iterable[Any]]) -> dict[str, Any]:
        """Return the objects of a file by name, in the file's order.

        Args:
            path: The path of the file.
            build: Returns the objects of an entry, each with a `name`; its second argument is the place of the entry.

        Raises:
            ConfigError: The file cannot be read, an object cannot be built, or two objects have one name.
        """
        loaded: dict[str, Any] = {}
        for index, entry in enumerate(self.entries(Path(path))):
            where = f"{path}: {self.key}[{index}]"
            for made in build(entry, where):
                if made.name in loaded:
                    raise ConfigError(f"{where}: the {self.name} {made.name!r} is used twice; {self.rename}")
                loaded[made.name] = made
        return loaded

    def entries(self, path: Path) -> list[Any]:
        """Return the entries of a file, without checking them.

        Raises:
            ConfigError: There is no such file, it is not YAML, or it has no list of entries.
        """
        # The process of an agent imports this module, and may have no more than the standard library.
        import yaml

        from verl_multiturn.calls.yaml_text import read_yaml, words_of_two_meanings

        if not path.is_file():
            raise ConfigError(f"{self.setting} {str(path)!r} is no file; {self.remedy}")
        text = read_text(path, f"{self.setting} {str(path)!r}", "write it again")
        try:
            content = read_yaml(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{self.setting} {str(path)!r} is no valid YAML: {error}") from None
        except RecursionError:
            raise ConfigError(f"{self.setting} {str(path)!r} is no valid YAML: it is nested too deeply") from None
        if not isinstance(content, dict) or not isinstance(content.get(self.key), list) or not content[self.key]:
            raise ConfigError(
                f"{path}: expected a mapping with a non-empty list under {self.key!r}, got {content!r:.200}"
            )
        if unknown := sorted(set(content) - {self.key}, key=str):
            raise ConfigError(f"{path}: unknown key {unknown[0]!r}; only {self.key!r} is known")
        for (key, index, *rest), word, before in words_of_two_meanings(text):
            # Settings of ours have types, by which a text such as `off` is read; an author's settings have none.
            if rest[:1] == ["config"] and (len(rest) > 2 or not _is_ours(content[key][index])):
                at = ".".join(map(str, rest))
                raise ConfigError(
                    f"{path}: {key}[{index}].{at}: {word!r} is {before!r} in YAML 1.1, and not in YAML 1.2, which is "
                    f"read here; put it in quotes if it is a text, or write {_plainly(before)}"
                )
        return [_at_home(entry) for entry in content[self.key]]


def _at_home(entry: Any) -> Any:
    """Return an entry with its paths below the home folder; a schema is for the model, and stays as it is."""
    if not isinstance(entry, Mapping):
        return entry
    return {key: value if key == "tool_schema" else at_home(value) for key, value in entry.items()}


def _is_ours(entry: Any) -> bool:
    """Return whether an entry names something of this package."""
    return isinstance(entry, Mapping) and any(
        isinstance(entry.get(key), str) and entry[key].startswith("verl_multiturn.")
        for key in ("class_name", "toolset")
    )


def _plainly(value: Any) -> str:
    """Return how a value of YAML 1.1 is written so that YAML 1.2 reads the same."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_keys(entry: Mapping[Any, Any], known: Collection[str], where: str, known_are: str) -> None:
    """Refuse an entry with a key that is not known.

    Args:
        entry: The entry.
        known: The known keys.
        where: The place that errors name, for example `tools.yaml: tools[0]`.
        known_are: Words of the error for the known keys where none is near.

    Raises:
        ConfigError: There is such a key.
    """
    if unknown := sorted(set(entry) - set(known), key=str):
        hint = did_you_mean(str(unknown[0]), known) or known_are
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; {hint}")


def construct(entry: Mapping[str, Any], key: str, where: str, make: Callable[[dict[str, Any]], Any]) -> Any:
    """Call what an entry names with the entry's `config`, and return the result.

    Args:
        entry: The entry, perhaps with `config`.
        key: The key that names the author's class or function, for example `class_name`.
        where: As in `check_keys`.
        make: Calls it with a `config`.

    Raises:
        ConfigError: `config` is not a mapping, or the author's code raised something.
    """
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}.config: expected a mapping, got {config!r}")
    try:
        return make(dict(config))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (Exception, SystemExit) as error:  # an author's code may raise anything
        # The keys alone: a value may be a password.
        keys = ", ".join(map(str, config)) or "none"
        # Classes are called by keywords, as in verl.
        found = re.search(r"__init__\(\) got an unexpected keyword argument '(config|tool_schema)'", message_of(error))
        remedy = f"; let its __init__ take an argument with the name {found[1]}" if found else ""
        raise ConfigError(f"{where}: {entry[key]} (config keys: {keys}) raised {describe(error)}{remedy}") from error


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
        raise ConfigError(
            f"{where}: cannot import {name!r} ({describe(error)}); install it, set PYTHONPATH, or start "
            "in the folder where it lies"
        ) from error
