"""`ListFile`: a YAML file that lists authors' objects, with their classes, settings and limits.

tools:                                      `ListFile.key`
- class_name: my_package.search.Search    an entry; `resolve_class` (`dotted_names.py`) finds the class
config: {top_k: 3}                      `construct` makes the object
limits: {timeout_s: 20}                 `set_limits` (`calls/limits.py`) stores its limits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe, did_you_mean, message_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import at_home
from verl_multiturn.rows.files import read_text

_PLACES = {
    "tools": "a tools' file; give it as tool_config_path (check-tool FILE, validate FILE)",
    "interaction": "an interactions' file; give it as interaction_config_path (check-interaction FILE, validate "
    "--interactions FILE)",
}
"""The kinds of files by their keys, and where a file of each kind belongs: one may be given in another's place."""


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

        from verl_multiturn.calls.loading.yaml_text import read_yaml, words_of_two_meanings

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
            expected = f"{path}: expected a mapping with a non-empty list under {self.key!r}, got {content!r:.200}"
            keys = list(map(str, content)) if isinstance(content, dict) else []
            if other := [_PLACES[key] for key in keys if key in _PLACES and key != self.key]:
                raise ConfigError(f"{expected}; this is {other[0]}")
            hints = (did_you_mean(key, [self.key]) for key in keys if key != self.key)
            raise ConfigError("; ".join(filter(None, [expected, next(hints, "")])))
        if unknown := sorted(set(content) - {self.key}, key=str):
            apart = ", and that is for a file of its own" if unknown[0] in _PLACES else ""
            raise ConfigError(f"{path}: unknown key {unknown[0]!r}; only {self.key!r} is known{apart}")
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
