"""`CallLimits`: the key `limits` of the YAML entry of an author's object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verl_multiturn.calls.loading.dotted_names import resolve_class
from verl_multiturn.config import OutageMode, read_model
from verl_multiturn.errors import ConfigError

_ATTRIBUTE = "multiturn_limits"
Limits = TypeVar("Limits", bound="CallLimits")


class OutageLimits(BaseModel):
    """Rules for outages of a tool or an interaction: which errors are one, and the reaction of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: OutageMode | None = None
    """The reaction to an outage; null: that of the class, and else `custom.multiturn.outage.mode`.

    - `pause`: calls and new conversations wait for its end, and the conversations that hit it are not trained on.
    - `mask`: each conversation that hits one ends, and is not trained on. Nothing waits.
    - `off`: the model reads the error, as that of any other failure.
    """

    timeouts: Literal["model", "outage"] | None = None
    """The cause of a call that is late; null: that of the class, and else `model`.

    `model`: the time may depend on the model's text, as with code that it runs. `outage`: on the service alone.
    """

    addresses: Literal["model", "service"] | None = None
    """Who chooses the addresses that are opened; null: as the class has it, and else decided call by call: an address
    in the arguments of the conversation's calls is the model's.

    `model`: the model. An address that refuses, is late or sends an unreadable answer is the model's mistake. An
    `OutageError` that you raise, or an error under `errors`, is an outage all the same. `service`: you. An address in
    the arguments is only text.
    """

    errors: tuple[type[BaseException], ...] = ()
    """Classes of errors that are outages, by their dotted names, beside those of `calls/outages/causes.py`; their
    subclasses, too. They are tested first. No class that a `ValueError` is an instance of."""

    @field_validator("errors", mode="before")
    @classmethod
    def _resolved(cls, names: Any) -> Any:
        if not isinstance(names, list | tuple):
            raise ValueError("expected a list of dotted names such as 'httpx.TransportError'")
        found = [name if isinstance(name, type) else resolve_class(name, "errors") for name in names]
        if strange := [name for name, each in zip(names, found, strict=True) if not issubclass(each, BaseException)]:
            raise ValueError(f"{strange[0]!r} is no class of errors")
        if wide := [name for name, each in zip(names, found, strict=True) if issubclass(ValueError, each)]:
            raise ValueError(
                f"{wide[0]!r} takes in the model's own mistakes (ValueError), by which it could call off a lost "
                "conversation; name a narrower class"
            )
        return found

    @model_validator(mode="after")
    def _late_addresses(self) -> OutageLimits:
        if self.addresses == "model" and self.timeouts == "outage":
            raise ValueError(
                "addresses is 'model' and timeouts is 'outage': an address that the model chose may never answer, by "
                "which it could call off a lost conversation; set timeouts to 'model', and raise OutageError where "
                "your own service is late"
            )
        return self


class CallLimits(BaseModel):
    """Limits that tools and interactions have alike.

    They limit the calls of a tool's `execute`, and of an interaction's `start` and `reply`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds that a call of a method may run, with its retries and the waits between them; null: `tool_timeout_s`."""

    queue_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that a call may wait for its turn.

    Then the model reads that the tool is busy; a conversation whose interaction is busy ends. So does one that waited
    as long for an MCP server of its own: it is not trained on.
    """

    concurrency: int = Field(1024, gt=0)
    """Largest number of calls at once in one worker process.

    A call that was given up counts until it has really ended.
    """

    concurrency_total: int | None = Field(None, gt=0)
    """Largest number of calls at once in all workers of the run, kept by a Ray actor; null: no limit."""

    response_characters: int = Field(100_000, ge=100)
    """Characters of one answer. A longer answer loses its middle, before a limit in tokens cuts the rest."""

    outage: OutageLimits = OutageLimits()
    """Rules for outages; see `OutageLimits`."""


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


def outage_rules(made: Any, limits: CallLimits, where: str) -> OutageLimits:
    """Return the outage rules of an author's object: its entry's `limits.outage`, and beyond that its class.

    Args:
        made: The object. Its class may have `outage_limits`.
        limits: The limits of its entry.
        where: The object, for errors.

    Raises:
        ConfigError: `outage_limits` of the class is something else.
    """
    of_class = getattr(made, "outage_limits", OutageLimits())
    if not isinstance(of_class, OutageLimits):
        raise ConfigError(f"{where}: its outage_limits are {of_class!r:.200}; give OutageLimits(…)")
    own = {key: value for key, value in limits.outage.model_dump().items() if value}
    return read_model(OutageLimits, of_class.model_dump() | own, f"{where}: limits.outage")
