"""Limits of a tool's calls: the key `limits` of its YAML entry."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from verl_multiturn.calls.limits import CallLimits, set_limits
from verl_multiturn.config import fixed
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.loading.functions import FunctionTool


class ToolLimits(CallLimits):
    """Limits of a tool's calls, each with its default and meaning."""

    GONE: ClassVar = fixed(backoff_s="0.5 s")

    retries: int = Field(0, ge=0, le=10)
    """Largest number of repetitions of a call that raised something other than ValueError.

    The first one comes after 0.5 s. The wait doubles with each further one, and is shortened at random by up to a half.
    Only for a tool that declares `repeatable = True`.
    """

    cache: int = Field(0, ge=0)
    """Number of answers kept in each worker process; the one that was used least recently is given up first.

    Only for a tool that declares `pure = True`.
    """


def attach_limits(tool: Any, raw: Any, where: str) -> None:
    """Read the `limits` of a YAML entry and store them on the tool.

    Args:
        tool: The tool.
        raw: The value of `limits` in the YAML.
        where: The place that errors name, for example `tools.yaml: tools[0].limits`.

    Raises:
        ConfigError: A limit is unknown or has a wrong value, or the tool does not allow `retries` or `cache`.
    """
    limits = set_limits(tool, raw, ToolLimits, where)
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
