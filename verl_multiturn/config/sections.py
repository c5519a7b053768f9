"""Sections of this package's settings, but for those of `proxy`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

OFF = BeforeValidator(lambda mode: "off" if mode is False else mode)
"""YAML reads a bare `off` as False."""
OutageMode = Annotated[Literal["pause", "mask", "off"], OFF]


class ScoreSettings(BaseModel):
    """Settings for the effect of rewards from outside `compute_score` on a conversation's score."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["none", "add", "replace"] = "none"
    """How the rewards change the score.

    - `none`: they are only reported.
    - `add`: they are added to the score of `compute_score`.
    - `replace`: they are the score, and `compute_score` is not called.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the sum of the rewards."""


class ContextSettings(BaseModel):
    """Settings for the part of a growing conversation that the model is shown.

    A row is a stretch in which ids were only appended. A conversation with several rows needs one of our estimators of
    advantages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["append", "window", "overflow"] = "append"
    """Content of a later turn's prompt.

    - `append`: all that came before, so that a conversation is one row.
    - `window`: the row's own messages and the last `turns` steps, rendered anew; a row for each turn.
    - `overflow`: all that came before, until an answer of the environment does not fit into `response_length`; then as
      in `window`.
    """

    turns: int = Field(default=1, gt=0)
    """The most steps in a prompt that is rendered anew. A step is the model's turn with its answers.

    Fewer are shown where they do not fit into `prompt_length`.
    """

    summary_prompt: str | None = Field(default=None, min_length=1)
    """In `overflow`, the text that asks the model for a summary before a row ends; null: no summary.

    The summary is trained as any turn. The next row shows it behind the data row's last message; where it has no words,
    the summary before it.
    """

    summary_length: int = Field(default=256, gt=0)
    """The most tokens of a summary."""

    weight: Literal["row", "conversation"] = "row"
    """Weight of a row in the policy loss.

    - `row`: verl's `loss_agg_mode` weighs each row: a conversation of more rows, or more tokens, weighs more.
    - `conversation`: the rows of each conversation together weigh as much as those of any other.
    """


class TirSettings(BaseModel):
    """Settings of text mode (`multi_turn.format=tir`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stop: list[Literal["boxed"]] = []
    r"""Ends of an answer, beside its end token. `boxed`, the one value: a closed `\boxed{…}` outside code.

    The token that closes the box is the last one of the answer; nothing is sampled behind it.
    """


class OtcSettings(BaseModel):
    """Settings for the reward of Optimal Tool Calls (`advantages/otc.py`), in training only.

    The score of a correct answer is multiplied by `alpha` and by a coefficient in (0, 1]. The coefficient
    is larger, the fewer tool calls the answer took.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: Literal["none", "ppo", "grpo"] = "none"
    """Form of the coefficient.

    - `none`: off.
    - `ppo`: from the conversation's own calls.
    - `grpo`: compared with the fewest calls of a correct answer in the conversation's group.
    """

    c: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """Smoothing constant: the larger, the less a call costs.

    In the form `ppo`, `c` calls halve the score. So the most calls that a conversation may have are a good first value.
    """

    alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of a correct answer's score."""


class AdvantageSettings(BaseModel):
    """Settings for estimators of advantages that count conversations: `mt_turns`, `mt_gigpo`, or your own function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: Annotated[dict[str, Any], BeforeValidator(lambda options: {} if options is None else options)] = {}
    """Keywords of the function that `algorithm.adv_estimator` names; null: none.

    - `mt_turns`: `gamma` (1.0), the discount of the reward of the next turn.
    - `mt_gigpo`: `gamma` (1.0); `weight` (1.0) of the second part, in which turns made in equal states are compared;
      `std` (false), whether both parts are divided by the standard deviation; `across_rows` (false), whether a
      conversation counts in the mean of the first part once for each of its turns, as in the paper's published code.
    - a function of your own: its keywords.
    """


class OutageSettings(BaseModel):
    """Settings for outages: a service that a tool, an interaction, an agent or a judge needs is down.

    The run does not learn from an outage, whatever the reward is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: OutageMode = "pause"
    """The reaction to an outage. `limits.outage.mode` of a tool's or an interaction's entry goes before it.

    - `pause`: when as many of a service's last calls failed as did not (8 calls, 2 conversations or more), calls and
      new conversations wait, with their clocks paused, until three calls in a row were answered.
      Conversations that hit the outage are not trained on.
    - `mask`: each conversation that hits an outage ends at once, and is not trained on. Nothing waits.
    - `off`: the model reads the error, as any other, and is trained on its reaction.
    """

    stop_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Seconds of an outage after which the run ends, with a checkpoint where no step is half trained.

    Nothing waits longer than this.
    """


class CacheSettings(BaseModel):
    """Settings that keep the generation servers from reading the same tokens again; only for servers of ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lead_ms: int = Field(default=1000, ge=0)
    """The most milliseconds that a first turn waits until the server has read the beginning that it shares with a
    sibling's; 0: siblings are sent at once.

    Siblings go to one server while it has room. With a router of your own (`rollout.router_config_path`) nothing waits.
    """

    full: float | None = Field(default=0.9, gt=0, le=1)
    """Share of a server's cache that conversations may need together; null: nothing waits for the cache.

    Above it, the turns of the younger conversations wait until the older ones have ended, or have had no turn for 10 s,
    with their clocks paused.
    """


class ReferenceResetSettings(BaseModel):
    """Settings for resets of the reference of the KL term, as in ProRL (arXiv 2505.24864).

    At the end of a step the reference gets the actor's parameters, and the optimizer begins anew. One of the two
    settings turns resets on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int | None = Field(default=None, gt=0)
    """Number of the trainer's steps from one reset to the next; null: not by steps."""

    kl_above: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Nats of `rollout/reference/kl`, the mean divergence of a step's policy from the reference, above which the step
    ends with a reset; null: not by divergence.
    """

    @property
    def is_on(self) -> bool:
        """Return whether the reference is ever reset."""
        return self.every is not None or self.kl_above is not None

    @model_validator(mode="after")
    def _has_one_rule(self) -> ReferenceResetSettings:
        if self.every is not None and self.kl_above is not None:
            raise ValueError("every and kl_above are two rules for one reset; set one of them")
        return self


class CheckpointEvaluationSettings(BaseModel):
    """Settings for evaluations of the run's checkpoints beside it.

    `trainer.checkpoint_callback_class` turns them on, with `EvaluateCheckpoints` of
    `verl_multiturn.verl_bridge.trainer.checkpoint_evaluations`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int | None = Field(default=None, gt=0)
    """Conversations of each validation row; null: `rollout.val_kwargs.n`."""

    devices: str | None = Field(default=None, min_length=1)
    """GPUs for the evaluation, as in CUDA_VISIBLE_DEVICES; null: it sees none.

    Give it one that the training does not use: it would take memory from it.
    """

    timeout_s: float = Field(default=7200.0, gt=0, allow_inf_nan=False)
    """Seconds after which an evaluation is ended."""

    deploy_to: str | None = None
    """Address of a gateway (`verl-multiturn gateway`) that serves good checkpoints; null: none does.

    The process of the evaluation asks it, when that is over. It reads the run's folder under the same path.
    """

    deploy_key_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the gateway's admin key."""

    deploy_if: Literal["better", "always"] = "better"
    """The checkpoints that are deployed: those with a higher mean reward than the one that serves, or all."""

    @model_validator(mode="after")
    def _has_key(self) -> CheckpointEvaluationSettings:
        if (self.deploy_to is None) != (self.deploy_key_env is None):
            raise ValueError("deploy_to and deploy_key_env need each other; set both, or neither")
        return self


class DerivedSettings(BaseModel):
    """State of a run that the start-up check writes beside the user's settings, for the run's other processes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    record_start: str | None = None
    """Name of the run's start, in the names of the records' files."""

    own_server: bool = Field(default=False, strict=True)
    """True: the servers of `rollout.name=sglang` are ours.

    It is written, and the name `sglang`, where you write `rollout.name=sglang_async`. Much of verl works only under the
    name `sglang`.
    """

    tool_config_path: str | None = None
    """Path of the tool YAML, moved here from `rollout.multi_turn.tool_config_path`.

    verl's worker would otherwise build every tool of that file a second time, and it accepts only entries with
    `config.type: native`.
    """
