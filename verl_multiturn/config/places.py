"""Places of this package's settings in the trainer's configuration: which names a section has, and who writes them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.config.model import model_of
from verl_multiturn.config.names import PATH
from verl_multiturn.config.sections import DerivedSettings
from verl_multiturn.config.settings import MultiTurnSettings
from verl_multiturn.errors import ConfigError


def with_derived(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run's configuration with the state of its start-up check under `derived`.

    Folders of earlier versions have it among our settings. Code that reads the configuration of a folder calls this.

    Args:
        config: The whole configuration of a trainer, resolved.
    """
    keys = PATH.split(".")
    ours = _section(config, keys)
    if not isinstance(ours, Mapping) or not (old := DerivedSettings.model_fields.keys() & ours.keys()):
        return config
    written = ours.get("derived")  # of a folder that somebody else made it may be anything
    derived = {key: ours[key] for key in DerivedSettings.model_fields if key in old}
    derived |= written if isinstance(written, Mapping) else {}
    return _replaced(config, keys, {key: value for key, value in ours.items() if key not in old} | {"derived": derived})


def _replaced(config: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a configuration with another value under the keys, one within the other."""
    first, *others = keys
    return {**config, first: _replaced(config[first], others, value) if others else value}


def why_not_derived(written: str) -> str:
    """Return why a user's run may not have the state of the start-up check, and the remedy.

    A configuration that a run has saved has it, and is read: so code that composes one of a user's words calls this.

    Args:
        written: The setting with its value, as it was written.
    """
    return f"{written}: the start-up check writes it, and everything after it believes it; leave it out"


def names_in(section: str) -> list[str]:
    """Return the names of this package's settings in a section of the trainer's configuration.

    Args:
        section: Path of the section, for example `PATH`.
    """
    if section != PATH and not section.startswith(f"{PATH}."):
        return []
    model: Any = MultiTurnSettings
    for key in filter(None, section.removeprefix(PATH).split(".")):
        field = model.model_fields.get(key) if model is not None else None
        model = field and model_of(field.annotation)
    return sorted(model.model_fields) if model is not None else []


def check_place(config: Mapping[str, Any]) -> None:
    """Refuse settings of this package in a place where nothing reads them, or under a name that is nearly theirs.

    Hydra takes any new path with a plus, and our pages write the path from `custom` on. A section beside ours, under
    whatever name, may be another plugin's, unless it has our settings.

    Args:
        config: The whole configuration of the trainer.

    Raises:
        ConfigError: There are such settings.
    """
    *parents, name = PATH.split(".")
    for place in (["custom"], ["rollout", "custom"]):
        if _section(config, [*place, name]) is not None:
            raise ConfigError(f"{'.'.join(place)}.{name}: nothing reads these settings here; write {PATH}.…")
    beside, ours = _section(config, parents), set(names_in(PATH))
    for key, section in beside.items() if isinstance(beside, Mapping) else ():
        is_near = key != name and difflib.get_close_matches(str(key).lower(), [name], cutoff=0.7)
        if is_near and isinstance(section, Mapping) and ours & set(map(str, section)):
            raise ConfigError(f"{'.'.join(parents)}.{key}: nothing reads these settings here; write {PATH}.…")


def _section(config: Any, keys: Sequence[str]) -> Any:
    """Return the value under nested keys; None without one."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
