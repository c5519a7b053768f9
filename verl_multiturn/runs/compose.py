"""The configuration of verl's trainer, composed by Hydra without importing verl."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.config import DERIVED, PATH, names_in, why_not_derived
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import at_home
from verl_multiturn.runs.plan import RunPlan, searchpath

_UNKNOWN = re.compile(r"Could not override '([^']+)'")
_OURS = f"{PATH.removeprefix('actor_rollout_ref.rollout.')}."
_VERLS = "pkg://verl.trainer.config"


def compose_run(plan: RunPlan) -> Any:
    """Compose the configuration of a planned run, and return it as Hydra's `DictConfig`.

    Args:
        plan: The planned run, from `plan_run`.

    Raises:
        ConfigError: verl or Hydra is not installed, an override or a file does not fit the configuration, or it has
            state that the start-up check writes.
    """
    folder = _folder_of_verl()
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise ConfigError(
            f"Hydra is not installed ({error}); it comes with verl: run this where verl is installed"
        ) from None
    # For `pkg://verl…`, Hydra would import verl, which takes many seconds. So name the folder of verl's YAML files.
    searched = [f"file://{folder / 'trainer' / 'config'}" if entry == _VERLS else entry for entry in plan.searched]
    # Hydra's own settings (`hydra.…`) are not part of the composed configuration.
    words = [word for word in plan.settings() if not word.lstrip("+~").startswith("hydra.")]
    try:
        with initialize_config_dir(str(plan.folder), version_base=None):
            config = compose("config", overrides=[searchpath(searched), *words])
            expand_homes(config)
            written = OmegaConf.select(config, DERIVED)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # a ValueError: `data=5` in a group's place
        raise ConfigError(f"{plan.name}: {_misspelt(str(error), plan, searched) or error}") from None
    if written is not None:
        raise ConfigError(why_not_derived(f"{DERIVED}={written}"))
    return config


def expand_homes(config: Any) -> None:
    """Expand `~/` in the values of a composed configuration in place; references to other values stay.

    Args:
        config: Hydra's `DictConfig`.
    """
    from omegaconf import OmegaConf, flag_override, read_write

    plain = OmegaConf.to_container(config, resolve=False)
    with read_write(config), flag_override(config, "struct", False):
        for path, value in _texts(plain, ()):
            if (expanded := at_home(value)) != value:
                section: Any = config
                for key in path[:-1]:
                    section = section[key]
                section[path[-1]] = expanded


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the texts of a configuration with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _texts(item, (*path, key))


def _misspelt(message: str, plan: RunPlan, searched: list[str]) -> str:
    """Return the error of an override of an unknown key; empty for another error of Hydra's."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    found = first = _UNKNOWN.search(message)
    words = [word for word in plan.settings() if not word.startswith("hydra.")]
    while found and first:
        left = [word for word in words if not word.startswith(f"{found[1]}=")]
        if "@" in found[1] or len(left) == len(words):
            return ""
        words = left
        try:
            with initialize_config_dir(str(plan.folder), version_base=None):
                return _unknown(first[1], compose("config", overrides=[searchpath(searched), *words]))
        except HydraException as error:  # another word is misspelt, too
            found = _UNKNOWN.search(str(error))
    return ""


def _unknown(path: str, section: Any) -> str:
    """Return the error in the path of an override; empty where it leads through a value.

    Args:
        path: Path of the override.
        section: The configuration without it.
    """
    place, is_there, new = "", True, f"takes a plus: +{path}=…"
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
    if path.partition(".")[0] not in plain and (whole := _whole_paths(path, plain)):
        return f"unknown key {path!r}; did you mean {' or '.join(map(repr, whole))}? a key that is really new {new}"
    for key in path.split("."):
        if section is not None and not isinstance(section, Mapping):
            return ""
        names, ours = list(map(str, section or ())), names_in(place.removesuffix("."))
        if f"{PATH}.".startswith(place):
            ours.append(PATH.removeprefix(place).partition(".")[0])
        is_there = is_there and key in names
        if not is_there and key not in ours:
            hint = did_you_mean(key, [*names, *ours])
            return f"unknown key {place + key!r}; {hint and hint + ' '}a key that is really new {new}"
        place, section = f"{place}{key}.", section[key] if section and is_there else None
    if not is_there:
        return f"{path!r} is a setting of ours, and {new}"
    return (
        f"the value of {path!r} has no such keys; to replace it, write '~{path}' '+{path}={{…}}', or to add one: "
        f"+{path}.NAME=…"
    )


def _whole_paths(end: str, config: Any) -> list[str]:
    """Return up to three settings whose paths end so: pages and messages write `rollout.n` or `multi_turn.format`."""
    if end.startswith(_OURS):
        return [f"mt.{end.removeprefix(_OURS)}"]
    keys = end.split(".")
    found: list[str] = []
    sections: list[tuple[str, Any]] = [("", config)]
    while sections and len(found) < 3:
        place, section = sections.pop(0)
        value = section
        for key in keys:
            value = value.get(key, ...) if isinstance(value, Mapping) else ...
        if value is not ...:
            found.append(f"{place}{end}")
        sections += [(f"{place}{key}.", inner) for key, inner in section.items() if isinstance(inner, Mapping)]
    return found


def resolved(config: Any) -> dict[str, Any]:
    """Return a composed configuration as plain dictionaries and lists, with all references replaced by values.

    Args:
        config: The `DictConfig` from `compose_run`.

    Raises:
        ConfigError: A value refers to another value that does not exist.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _folder_of_verl() -> Path:
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"verl is not installed for {sys.executable!r}; run verl-multiturn in the environment that trains (a "
            "recipe's run.sh takes its Python from the variable PYTHON)"
        )
    return Path(next(iter(found.submodule_search_locations)))
