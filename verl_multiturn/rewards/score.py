"""What a reward is given and what it returns.

Invariants:
- every reward, whatever happens in it, comes to the same keys, all floats;
- an answer is what the assistant itself said: no tool's output is in it, nor its own reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.tools.runtime import CallStatus


@dataclass(frozen=True)
class Solution:
    """What is scored.

    Attributes:
        data_source: of the row.
        texts: the assistant's own, one for each turn. A row of another agent loop than ours does not have them: then
            the decoded response is the only one, tool output and all.
        calls: (name, arguments as JSON text) of the calls of each turn; the name is empty where a call could not be
            read. Empty for a row of another agent loop.
        statuses: how each call ended, as in `tools/runtime.py`.
        extra_info: the row's own, and what the agent loop left.
        response: all that was decoded, with the calls as they are written, and tools' output.
    """

    data_source: str
    texts: tuple[str, ...]
    calls: tuple[tuple[tuple[str, str], ...], ...] = ()
    statuses: tuple[str, ...] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    response: str = ""

    @classmethod
    def of_row(cls, data_source: str, solution_str: str, extra_info: Mapping[str, Any] | None) -> Solution:
        """The solution in what verl hands to `compute_score`."""
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
        """The last turn's, empty when there is none."""
        return self.texts[-1] if self.texts else ""

    @property
    def answer(self) -> str:
        """The last turn's text after its reasoning; empty while that is not closed."""
        rest = self.text.rpartition("</think>")[2]
        return rest.partition("<think>")[0]

    @property
    def used_tool(self) -> bool:
        """Whether a tool executed a call without an error."""
        return str(CallStatus.OK) in self.statuses


@dataclass(frozen=True)
class Score:
    """What a reward found.

    Attributes:
        value: what the answer is worth, 1.0 when it is right.
        acc: 1.0 when it is right, else 0.0.
        format: 1.0 when it is written as asked for.
        answered: 1.0 when there is an answer.
        timed_out: 1.0 when the time of what was run to score it ran out.
        failed: 1.0 when the reward itself broke.
    """

    value: float = 0.0
    acc: float = 0.0
    format: float = 0.0
    answered: float = 0.0
    timed_out: float = 0.0
    failed: float = 0.0

    @classmethod
    def of(cls, right: bool, formatted: bool = True) -> Score:
        """Of an answer that is there, and right or wrong."""
        return cls(value=float(right), acc=float(right), format=float(formatted), answered=1.0)


class RewardOptions(BaseModel):
    """What every built-in reward has, under its name in `reward_kwargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_weight: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Taken off the score of an answer that is not written as asked for."""

    tool_use_bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the score of a right answer when a tool executed at least one call without an error."""

    wrong_call_credit: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the score of a wrong answer for each of its turns that called tools: verl's ReTool recipe has 0.1 on a
    scale from -1 to 1, at most 0.4."""

    wrong_call_limit: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """The most that `wrong_call_credit` comes to."""


def compose(score: Score, solution: Solution, options: RewardOptions) -> dict[str, float]:
    """What `compute_score` returns.

    `score` is `value`, less `format_weight` where the format is wrong, plus `tool_use_bonus` where the answer is right
    and a tool was used, or `wrong_call_credit` for each turn with calls where it is wrong. A reward that broke or ran
    out of time without a verdict gives 0, takes nothing off and adds nothing.
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
    }


def plain(value: Any) -> Any:
    """A value of Hydra or of a parquet file as Python's own: containers become dictionaries and lists."""
    if isinstance(value, Mapping):
        # Of rows of several kinds in one file, each has the keys of all, empty.
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value
