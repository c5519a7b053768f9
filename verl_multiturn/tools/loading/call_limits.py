"""Limits of the calls of a tool or an interaction: the key `limits` of its YAML entry."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.loading.functions import FunctionTool

_ATTRIBUTE = "multiturn_limits"


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


class ToolLimits(CallLimits):
    """Limits of a tool's calls, each with its default and meaning."""

    retries: int = Field(0, ge=0, le=10)
    """Largest number of repetitions of a call that raised something other than ValueError.

    Only for a tool that declares `repeatable = True`.
    """

    backoff_s: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Seconds to wait before the first repetition.

    The wait doubles with each further repetition, and is shortened at random by up to a half.
    """

    cache: int = Field(0, ge=0)
    """Number of answers kept in each worker process; the one that was used least recently is given up first.

    Only for a tool that declares `pure = True`.
    """


def attach_limits(tool: Any, raw: Any, where: str) -> None:
    """Read the `limits` of a YAML entry and store them on the tool.

    Args:
        tool: The tool; `limits_of` returns its limits from now on.
        raw: The value of `limits` in the YAML.
        where: The place that errors name, for example `tools.yaml: tools[0].limits`.

    Raises:
        ConfigError: A limit is unknown or has a wrong value, or the tool does not allow `retries` or `cache`.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping, got {raw!r}; known are {sorted(ToolLimits.model_fields)}")
    limits = read_model(ToolLimits, raw, where)
    for setting, attribute, meaning in (
        ("retries", "repeatable", "that calling it twice is safe"),
        ("cache", "pure", "that its answer depends on the arguments alone"),
    ):
        if getattr(limits, setting) and not getattr(tool, attribute, False):
            how = f"`{attribute} = True` in the class"
            if isinstance(tool, FunctionTool):
                how = f"`@tool({attribute}=True)` on the function"
            raise ConfigError(
                f"{where}.{setting}={getattr(limits, setting)}: {type(tool).__name__} does not declare {meaning}; set "
                f"{how}, or {setting} to 0"
            )
    setattr(tool, _ATTRIBUTE, limits)


def limits_of(tool: Any) -> ToolLimits:
    """Return the limits that the YAML gave a tool; the defaults where it gave none."""
    return getattr(tool, _ATTRIBUTE, None) or ToolLimits.model_validate({})
