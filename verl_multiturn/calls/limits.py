"""`CallLimits`: the key `limits` of the YAML entry of an author's object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError

_ATTRIBUTE = "multiturn_limits"
Limits = TypeVar("Limits", bound="CallLimits")


class CallLimits(BaseModel):
    """Limits that tools and interactions have alike.

    What is limited are the calls of a tool's `execute`, and of an interaction's `start` and `reply`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds that a call of a method may run, with its retries and the waits between them; null: `tool_timeout_s`."""

    queue_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that a call may wait for its turn.

    Then the model is told that the tool is busy; a conversation whose interaction is busy ends.
    """

    concurrency: int = Field(1024, gt=0)
    """Largest number of calls at once in one worker process.

    A call that was given up counts until it has really ended.
    """

    concurrency_total: int | None = Field(None, gt=0)
    """Largest number of calls at once in all workers of the run, kept by a Ray actor; null: no limit."""

    response_characters: int = Field(100_000, ge=100)
    """Characters of one answer. A longer answer loses its middle, before a limit in tokens cuts what is left."""


def set_limits(made: Any, raw: Any, kind: type[Limits], where: str) -> Limits:
    """Read the `limits` of a YAML entry, store them on the object of that entry, and return them.

    Args:
        made: The object; `limits_of` returns its limits from now on.
        raw: The value of `limits` in the YAML.
        kind: The class of the limits.
        where: The place that errors name, for example `tools.yaml: tools[0].limits`.

    Raises:
        ConfigError: A limit is unknown or has a wrong value.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {raw!r}; known are {sorted(kind.model_fields)}")
    limits = read_model(kind, raw, where)
    setattr(made, _ATTRIBUTE, limits)
    return limits


def limits_of(made: Any, kind: type[Limits]) -> Limits:
    """Return the limits that the YAML gave an author's object; the defaults where it gave none.

    Args:
        made: The object.
        kind: The class of its limits.
    """
    return getattr(made, _ATTRIBUTE, None) or kind.model_validate({})
