"""The input and the output of a reward: `Solution` and `Score`.

Invariants:
- the result of every reward has the same keys, whatever happens in the reward: all floats, and where the run has a
  rubric two texts of JSON (`with_verdicts`);
- an answer is text of the assistant itself, without any tool's output and without the assistant's reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.errors import UnjudgedError
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD
from verl_multiturn.tools.running.results import CallStatus


@dataclass(frozen=True)
class Solution:
    """The conversation that is scored.

    Attributes:
        data_source: The row's data source.
        texts: The assistant's texts, one for each turn. For a row of another agent loop than ours there is one text,
            the decoded response with all tool output.
        calls: For each turn its calls, as pairs of name and arguments (JSON text). The name is empty when a call could
            not be read. Empty for a row of another agent loop.
        statuses: For each call its `CallStatus`, as in `tools/running/results.py`.
        extra_info: The row's `extra_info`, with the entries that the agent loop added.
        response: The whole decoded response, with the calls as the model wrote them and the tools' output.
    """

    data_source: str
    texts: tuple[str, ...]
    calls: tuple[tuple[tuple[str, str], ...], ...] = ()
    statuses: tuple[str, ...] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    response: str = ""

    @classmethod
    def of_row(cls, data_source: str, solution_str: str, extra_info: Mapping[str, Any] | None) -> Solution:
        """Build the solution from the arguments that verl passes to `compute_score`."""
        extra_info = extra_info or {}
        texts = extra_info.get("assistant_texts")
        calls = extra_info.get("assistant_calls") or ()
        return cls(
            data_source,
            (solution_str,) if texts is None else tuple(text if isinstance(text, str) else "" for text in texts),
            tuple(tuple((str(call["name"]), str(call["arguments"])) for call in turn) for turn in calls),
            tuple(str(status) for status in extra_info.get("call_statuses") or ()),
            extra_info,
            solution_str,
        )

    @property
    def text(self) -> str:
        """Text of the last turn; empty when there is no turn."""
        return self.texts[-1] if self.texts else ""

    @property
    def answer(self) -> str:
        """Text of the last turn after its reasoning; empty when the reasoning is not closed."""
        return after_reasoning(self.text)

    @property
    def used_tool(self) -> bool:
        """True when a tool executed at least one call without an error."""
        return str(CallStatus.OK) in self.statuses


def after_reasoning(text: str) -> str:
    """Return the text of a turn after its reasoning; empty when the reasoning is not closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


Verdicts = Mapping[str, float | Mapping[str, float]]
"""The verdict of each criterion by its name: a number, or of a criterion for each turn the numbers by turn, from "1".
"""


@dataclass(frozen=True)
class Score:
    """The result of a reward.

    Attributes:
        value: Value of the answer, 1.0 when it is right.
        acc: 1.0 when the answer is right, else 0.0.
        format: 1.0 when the answer has the requested form, else 0.0.
        answered: 1.0 when there is an answer, else 0.0.
        timed_out: 1.0 when the time for scoring the answer ran out, else 0.0.
        failed: 1.0 when the reward itself broke, else 0.0.
        outage: 1.0 when it broke because something is not there, which no answer can bring about, else 0.0. Such a row
            is not trained.
        unjudgeable: 1.0 when it broke because of the ground truth, or of another cause of ours, whatever the answer is,
            else 0.0. Such a row is not trained either.
        verdicts: The verdict of each criterion, by the reward `rubric`; empty without criteria.
        turn_values: The part of `value` that each of the solution's texts earned, for estimators of advantages that
            compare turns. The rest of `value` belongs to the whole conversation; empty: all of it.
    """

    value: float = 0.0
    acc: float = 0.0
    format: float = 0.0
    answered: float = 0.0
    timed_out: float = 0.0
    failed: float = 0.0
    outage: float = 0.0
    unjudgeable: float = 0.0
    verdicts: Verdicts = field(default_factory=dict)
    turn_values: tuple[float, ...] = ()

    @classmethod
    def of(cls, right: bool, formatted: bool = True) -> Score:
        """Return the score of an answer that exists and is simply right or wrong.

        Args:
            right: Whether the answer is right.
            formatted: Whether it has the requested form.
        """
        return cls(value=float(right), acc=float(right), format=float(formatted), answered=1.0)


class TruthError(UnjudgedError):
    """A ground truth with which no answer can be scored."""


class RewardOptions(BaseModel):
    """Options that every built-in reward has, under its name in `reward_kwargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_weight: float = Field(default=0.0, ge=0, le=LARGEST_REWARD, allow_inf_nan=False)
    """Number taken off the score of an answer without the requested form."""

    tool_use_bonus: float = Field(default=0.0, ge=0, le=LARGEST_REWARD, allow_inf_nan=False)
    """Number added to the score of a right answer when a tool executed at least one call without an error."""

    wrong_call_credit: float = Field(default=0.0, ge=0, le=LARGEST_REWARD, allow_inf_nan=False)
    """Number added to the score of a wrong answer for each turn that called tools. verl's ReTool recipe adds 0.1 on a
    scale from -1 to 1, at most 0.4."""

    wrong_call_limit: float = Field(default=0.2, ge=0, le=LARGEST_REWARD, allow_inf_nan=False)
    """Most that `wrong_call_credit` adds to a score."""


def compose(score: Score, solution: Solution, options: RewardOptions) -> dict[str, float]:
    """Return the dictionary that `compute_score` returns.

    Its `score` is `value`, minus `format_weight` when the format is wrong. A right answer for which a tool was used
    gets `tool_use_bonus`. A wrong answer gets `wrong_call_credit` for each turn with calls, at most `wrong_call_limit`.
    When the reward broke or ran out of time, nothing is taken off, and a wrong answer gets nothing. Without a verdict
    the score is then 0.

    Args:
        score: The reward's result.
        solution: The conversation that was scored.
        options: Options of the reward.
    """
    total = score.value
    if not (score.failed or score.timed_out):
        total -= options.format_weight * (1.0 - score.format)
        if score.acc < 1.0:
            total += min(options.wrong_call_limit, options.wrong_call_credit * sum(map(bool, solution.calls)))
    if score.acc >= 1.0 and solution.used_tool:
        total += options.tool_use_bonus
    return {
        "score": float(total),
        "acc": float(score.acc),
        "format": float(score.format),
        "answered": float(score.answered),
        "timed_out": float(score.timed_out),
        "failed": float(score.failed),
        "outage": float(score.outage),
        "unjudgeable": float(score.unjudgeable),
    }


VERDICTS, TURN_VALUES = "verdicts", "turn_values"
"""Keys of a reward function's result, whose values are JSON: `Score.verdicts` and `Score.turn_values`."""


def with_verdicts(report: Mapping[str, float], score: Score) -> dict[str, Any]:
    """Return the report of a reward with the verdicts of its criteria; "" where it has none.

    They are texts, because verl takes the mean of whatever else it finds in a validation's reports.

    Args:
        report: The result of `compose`.
        score: The reward's result.
    """
    values = {VERDICTS: score.verdicts, TURN_VALUES: score.turn_values}
    return {**report, **{key: json.dumps(value) if value else "" for key, value in values.items()}}


def verdicts_of(report: Mapping[str, Any]) -> dict[str, float | dict[str, float]]:
    """Return the verdicts in a reward function's report by their criteria; {} without any.

    Args:
        report: The report, of any reward function.
    """
    given = _read_json(report.get(VERDICTS))
    named = given.items() if isinstance(given, dict) else ()
    return {
        name: own
        for name, own in named
        if _is_number(own) or (isinstance(own, dict) and all(map(_is_number, own.values())))
    }


def turn_values_of(report: Mapping[str, Any]) -> list[float] | None:
    """Return the part of the reward that each of the solution's texts earned; None: all of it belongs to the whole.

    Args:
        report: The report, of any reward function.
    """
    given = _read_json(report.get(TURN_VALUES))
    return given if isinstance(given, list) and all(map(_is_number, given)) else None


def _read_json(text: Any) -> Any:
    """Return the value of a text of JSON; None for anything else, since a report's keys are its author's."""
    try:
        return json.loads(text) if isinstance(text, str) and text else None
    except (ValueError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD


def plain(value: Any) -> Any:
    """Return a value of Hydra or of a parquet file in Python's own types: containers become dictionaries and lists.

    Keys whose value is None are omitted.
    """
    if isinstance(value, Mapping):
        # When a file holds rows of several kinds, each row has the keys of all kinds, with None for those it lacks.
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value
