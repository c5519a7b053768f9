"""All settings of this package."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from verl_multiturn.config.model import read_model
from verl_multiturn.config.names import ASSISTANT, PATH, USER
from verl_multiturn.config.proxy import ProxySettings
from verl_multiturn.config.sections import (
    OFF,
    AdvantageSettings,
    CacheSettings,
    CheckpointEvaluationSettings,
    ContextSettings,
    DerivedSettings,
    OtcSettings,
    OutageSettings,
    ReferenceResetSettings,
    ScoreSettings,
    TirSettings,
)
from verl_multiturn.errors import ConfigError

ImportanceWeight = Literal["exact", "truncated", "verl"]
FilterMode = Annotated[Literal["off", "skip", "refill", "difficulty"], OFF]
PrefixTree = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda mode: {False: "off", True: "on"}.get(mode, mode) if isinstance(mode, bool) else mode),
]
"""YAML reads a bare `on` as True, too."""


class MultiTurnSettings(BaseModel):
    """All settings of this package, each with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GONE: ClassVar = {
        "record_start": "each start of a run names itself; leave it out",
        "own_server": "actor_rollout_ref.rollout.name says whose servers run; leave it out, and set that to "
        "sglang_async for those of this package",
        "tool_config_path": "nothing reads it here; write it as actor_rollout_ref.rollout.multi_turn.tool_config_path",
    }

    tool_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds that one call of one method of a tool may take.

    When `execute` does not answer in time, the model reads an error.
    """

    request_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Wall-clock seconds of a whole conversation; null: no limit.

    Tokens sampled until then are kept. The tools have 10 s more to be released.
    """

    turn_length: int | None = Field(None, gt=0)
    """The most tokens that the assistant may sample in one turn; null: the rest of `rollout.response_length`."""

    observation_length: int | None = Field(None, gt=0)
    """The most tokens of one tool response; null: `multi_turn.max_tool_response_length` holds.

    A longer response is cut at `multi_turn.tool_response_truncate_side`. This limit replaces
    `multi_turn.max_tool_response_length`, which counts characters.
    """

    user_turn_length: int | None = Field(None, gt=0)
    """The most tokens of one message of an interaction; null: no limit of its own.

    A longer message is cut at `multi_turn.tool_response_truncate_side`.
    """

    turns_reminder: bool = False
    """True: after its calls the model reads how many turns remain, as in SkyRL-SQL.

    The words come on top of `observation_length`. The setting needs `multi_turn.max_assistant_turns`.
    """

    max_tool_calls: int | None = Field(None, gt=0)
    """The most tool calls executed in a conversation; null: no limit. A message informs the model at the end."""

    max_malformed_turns: int | None = Field(3, gt=0)
    """The most turns in a row with calls and no readable one; null: no limit.

    The last of these turns ends the conversation.
    """

    tool_reward: ScoreSettings = ScoreSettings()
    """Effect of the tools' rewards on the score, in training and in validation alike.

    The tools' rewards are the step rewards of the calls and each tool's `calc_reward`.
    """

    interaction_reward: ScoreSettings = ScoreSettings()
    """Effect of the interactions' rewards on the score, in training and in validation alike.

    An interaction's rewards are those of the turns that it answers, and its `score` of the whole conversation.
    """

    context: ContextSettings = ContextSettings()
    """Settings for conversations that grow beyond a prompt: which part of them the model is shown."""

    near_rewards: Literal["quick", "all", "off"] = "quick"
    """Which rewards the agent-loop worker judges itself, where a reward worker would cost a call of Ray for each row.

    Both ask the same reward manager and reward function, and have the same results.

    - `quick`: the rewards `gsm8k`, `qa` and `tool_n1` of `verl_multiturn.rewards`, which only compare texts.
    - `all`: every reward. Right for a function of your own that takes well below a millisecond and waits for nothing.
      One that waits for others should be `async def`; its computation blocks all conversations of the worker.
    - `off`: none.
    """

    tir: TirSettings = TirSettings()
    """Settings of text mode."""

    otc: OtcSettings = OtcSettings()
    """Optimal Tool Calls: fewer tool calls for the same answer earn more.

    This holds in training only; validation keeps the score as it is.
    """

    advantage: AdvantageSettings = AdvantageSettings()
    """Settings of estimators of advantages that count conversations."""

    proxy: ProxySettings = ProxySettings()
    """Settings of the agent loop `proxy_agent`."""

    outage: OutageSettings = OutageSettings()
    """Settings for outages of tools, interactions, agents and judges."""

    cache: CacheSettings = CacheSettings()
    """Settings that keep the generation servers from reading the same tokens again."""

    reference_reset: ReferenceResetSettings = ReferenceResetSettings()
    """Resets of the reference of the KL term."""

    checkpoint_evaluation: CheckpointEvaluationSettings = CheckpointEvaluationSettings()
    """Settings for evaluations of the run's checkpoints beside it."""

    void_turn_pattern: str | None = None
    """Regular expression for a final answer, for example `\\\\boxed`; null: off. In training only.

    A conversation is kept out of the loss if one of its turns has neither a readable tool call nor a match (a void turn
    of SimpleTIR). Its reward still counts in its group.
    """

    record_dir: str | None = None
    """Folder for records of all conversations (`records/schema.py` describes them); null: no records."""

    record_share: float = Field(1.0, ge=0, le=1)
    """Share of the groups whose records are kept; 1: all of them. Groups are kept whole. That a conversation began, and
    how it ended, is written for all of them."""

    record_max_gb: float | None = Field(None, gt=0)
    """The most GB of records in `record_dir`, those of earlier starts included; null: no limit. Further records are
    dropped, and counted in the metric `rollout/records/dropped`."""

    record_redact: tuple[str, ...] = ()
    """Values that records hide: names of entries, such as `api_key`, whose values become `***` in all texts of
    rows, tools, users and the model; and, after `re:`, regular expressions, whose matches in texts become `***`.
    Token ids stay."""

    certificate_share: float = Field(1.0, ge=0, le=1)
    """Share of each training batch's conversations that the trainer verifies; 1: all of them, 0: off.

    The trainer compares all rows of such a conversation with the engine's receipts, before it uses them. A row that
    does not agree ends the run.
    """

    max_staleness: int | None = Field(None, ge=0, strict=True)
    """The largest age of a trained token, in weight versions; null: verl's own settings hold.

    A token that the newest weights sampled has the age 0. The start-up check derives verl's settings from this one:
    `num_warmup_batches`, unless you set it to a number up to this one, and `max_off_policy_threshold`. In the trainer
    `sync` only 0 is possible.
    """

    staleness_strategy: Literal["drop", "wait", "mask", "reroll"] = "reroll"
    """The treatment of a group of conversations that is too slow for `max_staleness`.

    - `drop`: it is evicted when it has finished, and a fresh prompt takes its place. The slow prompts are lost.
    - `wait`: the trainer waits for it.
    - `mask`: it is trained, except for its tokens that are too old.
    - `reroll`: it is cancelled, and the same prompt is begun anew with newer weights, at most 3 times; then as `mask`.
    """

    filter: FilterMode = "off"
    """The treatment of groups without signal: their valid conversations all have one reward.

    - `off`: they are trained as the others, with advantages of 0.
    - `skip`: they stay in the step's batch, and nothing is computed for them: no old log-probabilities, no update.
    - `refill`: they are evicted, and fresh prompts take their places, in the same step.
    - `difficulty`: as `skip`; besides, prompts whose last group had a signal are drawn again.

    Rows whose advantages are all 0 leave the update in each of them, if there is neither a KL loss nor an entropy
    bonus. The loss is still divided by the counts of the whole batch.
    """

    importance_weight: ImportanceWeight = "exact"
    """How an asynchronous run with `max_staleness` corrects for tokens that an older policy sampled (decoupled PPO).

    Each token's loss is weighted by its probability at the step's start over that under which it was sampled.

    - `exact`: as in equation 5 of AReaL, with nothing cut off.
    - `truncated`: the weight is at most `algorithm.rollout_correction.rollout_is_threshold`, and verl's dual clip
      (`actor.clip_ratio_c`) is on.
    - `verl`: verl's settings stay as they are. Its defaults have no weight.
    """

    ratio_level: Literal["turn", "conversation"] = "turn"
    """The tokens that share one ratio and one clip in the policy loss `mt_gspo`.

    - `turn`: those of a turn, which is a run of trained tokens in a row.
    - `conversation`: those of the whole conversation, which then has to be one row. The loss is verl's `gspo`.
    """

    old_log_prob_bound: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Nats by which the engine's log-probs may differ from the trainer's, to be taken for the old ones; null: verl's
    pass over the whole batch computes them.

    In a batch of tokens of age 0, the pass then computes a sixteenth of the rows, drawn anew in each step. If each of
    their tokens agrees with the engine's within this bound, the other rows take the engine's; if not, all are computed.
    `rollout/old_log_prob/error_max` is their largest difference: look at it with a bound of 0 before you set one.
    `actor/entropy` and `training/rollout_probs_diff_*` are those of the rows that were computed.
    """

    prefix_tree: PrefixTree = "off"
    """Whether training computes each common prefix of a micro-batch's rows once.

    - `auto`: where that is exact. Where it is not, verl's own engine computes row by row, and the reason is printed
      once.
    - `on`: the same, and the run ends where it is not exact.
    - `off`: verl's own engine.

    It holds with `actor.strategy` `fsdp` and `fsdp2`. On a CPU a run that does not set it has `auto`.
    """

    silent_settings: Literal["refuse", "warn"] = "refuse"
    """The reaction of the start-up check to settings of verl that are set and have no effect, or another one.

    - `refuse`: those that would change the training end the run. Those that would change only speed or memory, and
      those of a part that is off, are reported, and the run goes on.
    - `warn`: all are reported, and the run goes on.

    Either way one message lists all of them.
    """

    interaction_config_path: str | None = None
    """Path of the YAML of simulated users and environments; null: a turn without a tool call ends the conversation."""

    train: list[Literal["assistant", "user"]] | None = None
    """The roles that are trained in conversations with a simulated user whom the policy plays (`PolicyUser`).

    - null, or `[assistant]`: the user's text is not trained, and there are no roles.
    - `[assistant, user]`: both speakers, in rows of their own; advantages compare the same role's rewards.

    Those of agents are `proxy.train`.
    """

    derived: DerivedSettings = DerivedSettings()
    """State that the start-up check writes. Do not set it yourself."""

    @field_validator("train")
    @classmethod
    def _trains_the_assistant(cls, train: list[str] | None) -> list[str] | None:
        if train is not None and (ASSISTANT not in train or len(set(train)) < len(train)):
            raise ValueError(
                f"expected [{ASSISTANT}] or [{ASSISTANT}, {USER}], since a reward function reads the assistant; name "
                "both to train the user"
            )
        return train

    @model_validator(mode="after")
    def _has_one_sort_of_roles(self) -> MultiTurnSettings:
        if self.trains_user and self.proxy.roles is not None:
            raise ValueError(f"train={self.train} with proxy.roles={self.proxy.roles}: a run has roles of one sort")
        return self

    @property
    def trains_user(self) -> bool:
        """Return whether the text of `PolicyUser` is trained."""
        return USER in (self.train or ())

    @property
    def trained_roles(self) -> tuple[str, ...] | None:
        """Return the names of the roles that a run trains, its agents' or its conversations'; None without roles."""
        if self.trains_user:
            return ASSISTANT, USER
        proxy = self.proxy
        if proxy.roles is None:
            return None
        return tuple(name for name in proxy.roles if proxy.train is None or name in proxy.train)

    @field_validator("void_turn_pattern")
    @classmethod
    def _is_regular_expression(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"no regular expression ({error}); put it in single quotes, since a shell removes backslashes"
            ) from None
        return pattern


def read_settings(raw: Mapping[str, Any] | None) -> MultiTurnSettings:
    """Read the settings of this package, which are validated once in a process for each content.

    Args:
        raw: The mapping under `PATH`; None: all defaults.

    Raises:
        ConfigError: A key is unknown (the error names the nearest known one), or a value does not fit.
    """
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(f"{PATH}: expected a mapping, got {raw!r}; write each setting under its own key")
    raw = dict(_with_options(_without_history(raw or {})))
    try:
        content = pickle.dumps(raw)
        is_whole = bool(pickle.loads(content) == raw)
    except Exception:  # an object of somebody's own, which may refuse in any way
        is_whole = False
    return _validated(content) if is_whole else read_model(MultiTurnSettings, raw, PATH)


@functools.lru_cache(maxsize=64)
def _validated(content: bytes) -> MultiTurnSettings:
    """Validate settings by their content: they may change in place, and a refusal is not remembered."""
    return read_model(MultiTurnSettings, pickle.loads(content), PATH)


def _without_history(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings without `proxy.history=sampled`, which this version still accepts; the start reports it."""
    proxy = raw.get("proxy")
    if not isinstance(proxy, Mapping) or proxy.get("history") != "sampled":
        return raw
    return {**raw, "proxy": {key: value for key, value in proxy.items() if key != "history"}}


OPTIONS_BEFORE = {
    "gamma": ("gamma", {}),
    "weight": ("weight", {}),
    "norm": ("std", {"mean": False, "std": True}),
    "across": ("across_rows", {"conversations": False, "rows": True}),
}
"""Settings under `advantage` that were options of our estimators before: each option's name, and other values of it."""


def _with_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with those of `OPTIONS_BEFORE` under `advantage.options`; the start reports them."""
    section = raw.get("advantage")
    if not isinstance(section, Mapping) or not (old := [name for name in OPTIONS_BEFORE if name in section]):
        return raw
    options = section.get("options") or {}
    if not isinstance(options, Mapping):  # its model refuses it
        return raw
    moved = {}
    for name in old:
        option, values = OPTIONS_BEFORE[name]
        if option in options:
            raise ConfigError(f"{PATH}.advantage: {name} and options.{option} are one setting; leave out {name}")
        if values and section[name] not in values:
            raise ConfigError(f"{PATH}.advantage.{name}={section[name]!r}: expected one of {', '.join(values)}")
        moved[option] = values[section[name]] if values else section[name]
    rest = {name: value for name, value in section.items() if name not in old}
    return {**raw, "advantage": rest | {"options": {**moved, **options}}}
