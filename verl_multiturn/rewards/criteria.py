"""`Criterion`: a question to which the reward `rubric` wants a number; of the options, or of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, StringConstraints

from verl_multiturn.config import read_model
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.score import plain
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD

KEY = "criteria"
"""The entry of a row's `extra_info` that has criteria of its own."""
_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
MARKS = frozenset({"rank", "rivals", "disagreements", "invalid", "dropped", "alone", "failed", "timed_out"})
"""Keys of the verdicts on a sibling (`relative.py`), which no criterion may have as its name."""


def _no_mark(name: str) -> str:
    if name in MARKS:
        raise ValueError(f"{name!r} is a verdict on siblings, and no criterion can have its name; write another one")
    return name


class Criterion(BaseModel):
    """One criterion by which the judge scores a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[StrictStr, StringConstraints(pattern=f"^{_NAME}$"), AfterValidator(_no_mark)]
    """Its name in verdicts, records and metrics: a letter, then letters, digits, `_` and `-`, at most 64.
    None of `MARKS`."""

    text: Annotated[StrictStr, StringConstraints(strip_whitespace=True, min_length=1)]
    """The criterion in words for the judge: when the number is 1, and when it is 0."""

    weight: Annotated[StrictFloat | StrictInt, Field(gt=0, le=LARGEST_REWARD, allow_inf_nan=False)] = 1.0
    """Its share in the score, beside the weights of the other criteria."""

    turns: Literal["each", "last"] = "last"
    """`last`: the judge gives one number, for the assistant's last turn as the end of the conversation. `each`: one for
    each of its turns."""


def _each_once(criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
    names = [each.name for each in criteria]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the name {twice!r} is there twice; give each criterion a name of its own")
    return criteria


Criteria = Annotated[tuple[Criterion, ...], AfterValidator(_each_once)]
"""Criteria, each with a name of its own, in the order in which the judge reads them."""


def criteria_of(extra_info: Mapping[str, Any], configured: Sequence[Criterion], row: str) -> tuple[Criterion, ...]:
    """Return the criteria for a row: its own, or else those of the options.

    Args:
        extra_info: The row's `extra_info`. Its `criteria` is a list of mappings, as a parquet file gives it.
        configured: The criteria of the options.
        row: Name of the row, for errors.

    Raises:
        ConfigError: The row's own criteria are not in the form of `Criterion`, or there are no criteria at all.
    """
    if (given := extra_info.get(KEY)) is None:
        if not configured:
            raise ConfigError(
                f"{row}: there are no criteria: neither reward_kwargs.rubric.criteria nor the row's extra_info has "
                "some; write one with a name and a text"
            )
        return tuple(configured)
    listed = plain(given)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{row}: extra_info.{KEY}: expected a list of criteria, got {show(given)}; mend the row")
    return _read(json.dumps(listed, default=str), row)


@lru_cache(maxsize=1024)  # the siblings of a row have the same
def _read(listed: str, row: str) -> tuple[Criterion, ...]:
    criteria = []
    for number, each in enumerate(json.loads(listed)):
        where = f"{row}: extra_info.{KEY}[{number}]"
        if not isinstance(each, dict):
            raise ConfigError(f"{where}: expected a mapping, got {show(each)}; write a name and a text")
        criteria.append(read_model(Criterion, each, where))
    try:
        return _each_once(tuple(criteria))
    except ValueError as error:
        raise ConfigError(f"{row}: extra_info.{KEY}: {error}") from None
