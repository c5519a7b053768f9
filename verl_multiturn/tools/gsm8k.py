"""`Gsm8kTool`: the model submits an answer to a grade-school problem and gets its score.

Invariants:
- the tool never reveals the ground truth;
- a call costs `STEP_PENALTY` unless its answer scores higher than every answer before it;
- the tool's reward is the score of the *last* answer, which is the model's final choice. With the best score a model
  would be paid for guessing until the tool confirms it, whatever its answer in the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

STEP_PENALTY = -0.05
"""Step reward of a call whose answer is not better than the best answer before it."""

# A minus directly after a letter or a digit is a dash, as in "10-5".
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
# Signs before a number that ends an expression, a range or another number: "10-5", "4 - 5", "10/5", "1e5".
_BEGUN = re.compile(r"(?:[\d)][ \t]*(?:[-+/^×÷·±]|(?<!\*)\*|\.\.+)|[√≠<≤≥]|!=|\\sqrt\{?|\d[a-zA-Z])[ \t]*\Z|\d\.?\Z")
_POWERS = tuple("⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOOK = 20
"""Characters before a number that are looked at."""


class Gsm8kSettings(BaseModel):
    """Settings of the tool, of which there are none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class _State:
    ground_truth: Decimal
    best: float = 0.0
    last: float = 0.0


def parse_answer(text: str) -> Decimal | None:
    """Return the number that an answer states; None where it states none.

    It is the last number in the text, or after the last `####` where there is one. Thousands separators, currency and
    percent signs and a final full stop do not matter: `It costs #### $1,200.` states 1200. A number that ends an
    expression or a range is none: `10-5` and `4 to 5²` do not state 5.
    """
    said = _plain(text.rpartition("####")[2])
    *_, last = [None, *_NUMBER.finditer(said)]
    if last is None or said.startswith(_POWERS, last.end()):
        return None
    is_end = _BEGUN.search(said[max(0, last.start() - _LOOK) : last.start()]) is not None
    return None if is_end else _value(last)


def first_number(text: str) -> Decimal | None:
    """Return the first number in a text; None without one."""
    found = _NUMBER.search(_plain(text))
    return None if found is None else _value(found)


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")


def _value(found: re.Match[str]) -> Decimal:
    return Decimal(found[0].replace(",", "").replace("$", ""))


class Gsm8kTool(BaseTool):
    """The tool `calc_gsm8k_reward(answer)`.

    An answer scores 1.0 if its number equals that of the row's `create_kwargs["ground_truth"]`, otherwise 0.0.

    Args:
        config: Empty: there are no settings.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: The config is not empty.
    """

    outage_limits = OutageLimits(mode="off")  # it answers in this process

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        read_model(Gsm8kSettings, config, "config")
        super().__init__(config, tool_schema)
        self._states: dict[str, _State] = {}

    def get_schema(self) -> ToolSchema:
        """Return the schema, with the name and the argument of verl's GSM8K recipe."""
        answer = {"type": "string", "description": "Your answer to the problem, a number."}
        return ToolSchema.read(
            {
                "type": "function",
                "function": {
                    "name": "calc_gsm8k_reward",
                    "description": "Check your answer to the problem: says whether it scores 1.0 or 0.0.",
                    "parameters": {"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
                },
            },
            "Gsm8kTool",
        )

    # A required argument, so that `validate` finds the rows without it.
    async def create(self, instance_id: str, *, ground_truth: str | float, **kwargs: Any) -> None:  # type: ignore[override]
        """Read the row's ground truth.

        Args:
            instance_id: Id of the conversation.
            ground_truth: The correct answer; its last number counts, as in `parse_answer`.
            kwargs: Not used.

        Raises:
            ConfigError: The ground truth states no number.
        """
        truth = parse_answer(str(ground_truth))
        if truth is None:
            raise ConfigError(f"create_kwargs.ground_truth: expected a number, got {ground_truth!r}; mend the data row")
        self._states[instance_id] = _State(truth)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Score an answer, and return the score to the model.

        Returns:
            The response, a step reward of 0.0 or `STEP_PENALTY`, and the metric `score`.
        """
        state = self._states[instance_id]
        answer = parse_answer(str(parameters["answer"]))
        state.last = 1.0 if answer == state.ground_truth else 0.0
        step_reward = 0.0 if state.last > state.best else STEP_PENALTY
        state.best = max(state.best, state.last)
        parsed = "No number was found in the answer." if answer is None else f"Parsed answer: {answer}."
        return ToolResponse(f"{parsed} Score: {state.last}."), step_reward, {"score": state.last}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer; 0.0 without one."""
        return self._states[instance_id].last

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
        self._states.pop(instance_id, None)
