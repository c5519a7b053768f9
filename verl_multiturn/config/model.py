"""Read a mapping as a model of pydantic, with errors that name the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

_SHOWN_CHARACTERS = 300
"""Most characters of a wrong value in an error; a row may be large."""


def fixed(**values: object) -> dict[str, str]:
    """Return the `GONE` of settings of earlier versions that are constants now, each with its value."""
    return {name: f"it is fixed at {value}; leave it out" for name, value in values.items()}


def read_model(model: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """Read a mapping from a YAML file or from Hydra as a pydantic model.

    Args:
        model: Class of the model.
        raw: The mapping.
        where: Name of the mapping in errors, for example `tools.yaml: tools[0].config`.

    Raises:
        ConfigError: A key is unknown (the error names the nearest known one), or a value does not fit.
    """
    _refuse_switches(model, raw, where)
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        found = error.errors()
        # A key that is missing may only be misspelt.
        first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            *parents, last = first["loc"]
            owner = _nested(model, parents)
            if (why := why_gone(owner, last)) is not None:
                raise ConfigError(f"{where}.{key}={show(first['input'], 60)}: {why}") from None
            raise ConfigError(f"{where}.{key}: unknown setting; {_hint(owner, str(last))}") from None
        place = f"{where}.{key}" if key else where
        got = "nothing" if first["type"] == "missing" else show(first["input"], _SHOWN_CHARACTERS)
        if first["type"] == "model_type":
            known = sorted(_nested(model, first["loc"]).model_fields)
            raise ConfigError(f"{place}: expected a mapping, got {got}; known are {known}") from None
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        raise ConfigError(f"{place}: {problem}, got {got}") from None


def _hint(model: type[BaseModel], name: str) -> str:
    """Return a hint for an unknown setting: the nearest known one, or that it is gone."""
    known, gone = sorted(model.model_fields), getattr(model, "GONE", {})
    hint = did_you_mean(name, [*known, *gone]) or f"known are {known}"
    return " ".join([hint, *(f"{each!r} is gone: {why}" for each, why in gone.items() if repr(each) in hint)])


def why_gone(model: type[BaseModel], name: Any) -> str | None:
    """Return why a setting of an earlier version is gone, and the remedy; None: it never was one.

    Args:
        model: The model of the settings. Its `GONE` has the reasons, by the setting's name.
        name: The setting.
    """
    gone: Mapping[str, str] = getattr(model, "GONE", {})
    return gone.get(str(name))


def _refuse_switches(model: type[BaseModel], raw: Mapping[str, Any], where: str) -> None:
    """Refuse true and false for a number: pydantic takes them for 1 and 0, which their author does not mean."""
    for name, field in model.model_fields.items():
        value, kinds = raw.get(name), [field.annotation, *get_args(field.annotation)]
        if isinstance(value, bool) and (int in kinds or float in kinds) and bool not in kinds:
            raise ConfigError(f"{where}.{name}: expected a number, got {value}")
        inner = model_of(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            _refuse_switches(inner, value, f"{where}.{name}")


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model among the types of a field; None without one."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _nested(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """Return the model that a path of keys leads to, or the last model on the way to it."""
    for key in path:
        field = model.model_fields.get(str(key))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return model
        model = field.annotation
    return model
