"""Reading what authors write for the interactions in the box: the `config` of a YAML entry, and the values of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from verl_multiturn.config import why_gone
from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)


def read_config(config: Mapping[str, Any], settings: type[Settings], owner: str) -> Settings:
    """Return the settings that a `config` mapping holds.

    Args:
        config: The mapping.
        settings: The pydantic model of the settings.
        owner: Name of the interaction, for errors.

    Raises:
        ConfigError: A setting is unknown or wrong.
    """
    try:
        return settings.model_validate(dict(config))
    except ValidationError as error:
        # A key that is missing may only be misspelt.
        first = next((each for each in error.errors() if each["type"] == "extra_forbidden"), error.errors()[0])
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            if (why := why_gone(settings, name)) is not None:
                raise ConfigError(f"config of {owner}: {name}={show(first['input'], 60)}: {why}") from None
            hint = did_you_mean(name, settings.model_fields) or f"known are {sorted(settings.model_fields)}"
            raise ConfigError(f"config of {owner}: unknown key {name!r}; {hint}") from None
        got = "nothing" if first["type"] == "missing" else show(first["input"])
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        raise ConfigError(f"config of {owner}: {name or 'config'}: {problem}, got {got}; correct it") from None


def plain(value: Any) -> Any:
    """Return a value of NumPy, as rows may hold, as JSON has it; the `default` of `json.dumps`."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{show(value, 60)} is no plain value")
