"""`limits:` of a tool's YAML entry: what its calls may take."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.functions import FunctionTool

_ATTRIBUTE = "multiturn_limits"


class ToolLimits(BaseModel):
    """Each limit with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Run time of each call of a method, retries and the waits between them included; null: `tool_timeout_s`."""

    queue_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """How long a call may wait for its turn before the model is told that the tool is busy."""

    concurrency: int = Field(1024, gt=0)
    """Calls of `execute` at once in one worker process. A call that was given up counts until it has really ended."""

    concurrency_total: int | None = Field(None, gt=0)
    """The same over all workers of the run, kept by an actor of Ray; null: no limit."""

    retries: int = Field(0, ge=0, le=10)
    """How often a call is repeated after it raised something other than ValueError; only for a tool that declares
    `repeatable = True`."""

    backoff_s: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Wait before the first repetition; doubled for each further one, and shortened by up to a half at random."""

    response_characters: int = Field(100_000, ge=100)
    """Of one answer; a longer one loses its middle, before `observation_length` cuts what is left."""

    cache: int = Field(0, ge=0)
    """Answers kept in each worker process, the oldest given up first; only for a tool that declares `pure = True`."""


def attach_limits(tool: Any, raw: Any, where: str) -> None:
    """Read the `limits` of a YAML entry, and keep them at the tool.

    Raises:
        ConfigError: a limit that does not fit, or one that the tool does not allow.
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
    """The limits that the YAML gave a tool, else the defaults."""
    return getattr(tool, _ATTRIBUTE, None) or ToolLimits.model_validate({})
