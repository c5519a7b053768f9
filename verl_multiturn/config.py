"""Our own settings, under `actor_rollout_ref.rollout.custom.multiturn`.

verl's `rollout.multi_turn.*` keep their meaning.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_multiturn.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

PATH = "actor_rollout_ref.rollout.custom.multiturn"


class ToolRewardSettings(BaseModel):
    """What the rewards of the tools do to a conversation's score: the step rewards of its calls, and each tool's
    `calc_reward`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["none", "add", "replace"] = "none"
    """none: they are only reported; add: they are added to what `compute_score` gives; replace: they are the score, and
    `compute_score` is not called."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of their sum."""


class OtcSettings(BaseModel):
    """The reward of Optimal Tool Calls (`rewards/otc.py`): in training, what `compute_score` gives a correct answer is
    multiplied by `alpha` and a coefficient in (0, 1], the larger, the fewer tool calls it took."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: Literal["none", "ppo", "grpo"] = "none"
    """none: off; ppo: by the conversation's own calls; grpo: compared with the fewest calls of a correct answer in its
    group."""

    c: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """Smoothing constant: the larger, the less a call costs. As many calls as `c` halve the score in the form ppo, so
    that the most calls a conversation may have are a good start."""

    alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of a correct answer's score."""


class MultiTurnSettings(BaseModel):
    """Each setting with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that one call of one method of a tool may take; the model is told when `execute` does not answer."""

    request_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Wall-clock seconds of a whole conversation; null: no limit. What was sampled until then is kept.
    The tools have 10 s more to be released."""

    turn_length: int | None = Field(None, gt=0)
    """Tokens that the assistant may sample in one turn; null: what is left of `rollout.response_length`."""

    observation_length: int | None = Field(None, gt=0)
    """Tokens of one tool's answer, cut at `multi_turn.tool_response_truncate_side`. It takes the place of
    `multi_turn.max_tool_response_length`, which counts characters; null: that one holds."""

    turns_reminder: bool = False
    """Whether the model is told after its calls how many turns it has left, as in SkyRL-SQL; the words come after
    `observation_length`, and need `multi_turn.max_assistant_turns`."""

    max_tool_calls: int | None = Field(None, gt=0)
    """Tool calls executed in a whole conversation; null: no limit. The model is told when they are used up."""

    max_malformed_turns: int | None = Field(3, gt=0)
    """Turns in a row whose calls can all not be read, after which a conversation ends; null: no limit."""

    tool_reward: ToolRewardSettings = ToolRewardSettings()
    """What the tools' rewards do to the score, in training and in validation alike."""

    otc: OtcSettings = OtcSettings()
    """Fewer tool calls for the same answer earn more, in training; validation keeps the score as it is."""

    void_turn_pattern: str | None = None
    """Regular expression of a final answer, for example `\\\\boxed`. A conversation with a turn that has neither a
    readable tool call nor a match is kept out of the loss (the void turns of SimpleTIR); null: none is. Its reward
    counts in its group all the same. In training alone."""

    record_dir: str | None = None
    """Folder that every finished conversation is written to, one JSON object a line; null: none."""

    certificate_share: float = Field(1.0, ge=0, le=1)
    """Share of each training batch's rows that the trainer verifies against what the engine returned, before it uses
    them; 1: all of them, 0: off. A row that does not fit ends the run."""

    tool_config_path: str | None = None
    """The tool YAML. Leave it: the start-up check moves `rollout.multi_turn.tool_config_path` here, since verl's worker
    would build every tool of that file a second time and knows only entries with `config.type: native`."""

    @field_validator("void_turn_pattern")
    @classmethod
    def _is_regular_expression(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"no regular expression ({error}); mind that a shell takes backslashes away") from None
        return pattern


def read_settings(raw: Mapping[str, Any] | None) -> MultiTurnSettings:
    """Typed settings.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a value that does not fit.
    """
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(f"{PATH}: expected a mapping, got {raw!r}")
    return read_model(MultiTurnSettings, raw or {}, PATH)


def read_model(model: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """A mapping of a YAML file or of Hydra as `model`.

    Args:
        where: named in the error, for example `tools.yaml: tools[0].config`.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a value that does not fit.
    """
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            *parents, last = first["loc"]
            known = sorted(_nested(model, parents).model_fields)
            near = difflib.get_close_matches(str(last), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {known}"
            raise ConfigError(f"{where}.{key}: unknown setting; {hint}") from None
        raise ConfigError(f"{where}.{key}: {first['msg']}, got {first['input']!r}") from None


def _nested(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The model that a path of keys leads to, as far as its fields are models themselves."""
    for key in path:
        field = model.model_fields.get(str(key))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return model
        model = field.annotation
    return model
