"""The settings of this package, under `actor_rollout_ref.rollout.custom.multiturn`.

verl's settings under `rollout.multi_turn.*` keep their meaning.
"""

from __future__ import annotations

import difflib
import functools
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD

Model = TypeVar("Model", bound=BaseModel)

ImportanceWeight = Literal["exact", "truncated", "verl"]
_SHOWN_CHARACTERS = 300
"""Most characters of a wrong value in an error; a row may be large."""
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Name of a role: clients send it as a model's name, and it is a part of a metric's name."""
ASSISTANT, USER = "assistant", "user"
"""The roles of a conversation whose user is trained, too."""
BOXED = "boxed"
"""The setting for an answer that ends with its box."""
POLICY = "policy"
"""The opponent that is the trained model."""
Opponent = StrictInt | StrictStr
_OFF = BeforeValidator(lambda mode: "off" if mode is False else mode)
"""YAML reads a bare `off` as False."""
OutageMode = Annotated[Literal["pause", "mask", "off"], _OFF]
FilterMode = Annotated[Literal["off", "skip", "refill", "difficulty"], _OFF]
PrefixTree = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda mode: {False: "off", True: "on"}.get(mode, mode) if isinstance(mode, bool) else mode),
]
"""YAML reads a bare `on` as True, too."""

PATH = "actor_rollout_ref.rollout.custom.multiturn"
"""Path of the settings in verl's configuration."""
DERIVED = f"{PATH}.derived"
"""Path of the state that the start-up check writes."""


def fixed(**values: object) -> dict[str, str]:
    """Return the `GONE` of settings of earlier versions that are constants now, each with its value."""
    return {name: f"it is fixed at {value}; leave it out" for name, value in values.items()}


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


class HarborSettings(BaseModel):
    """Settings of the agent `harbor`: a trial of Harbor for each session."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GONE: ClassVar = fixed(free_disk_gb="10 GB")

    harness: str = Field(default="terminus-2", min_length=1)
    """The harness: a name that Harbor knows, such as `mini-swe-agent` or `claude-code`, or `module:Class`."""

    harness_kwargs: dict[str, Any] = {}
    """Arguments of the harness, as Harbor's `agent.kwargs`."""

    environment: str = Field(default="docker", min_length=1)
    """Where tasks run: a name that Harbor knows, such as `podman` or `daytona`, `workspace`, or `module:Class`.

    A `workspace` is one of the embedded sandbox: no container, no image, no network.
    """

    environment_kwargs: dict[str, Any] = {}
    """Arguments of the environment, as Harbor's `environment.kwargs`. `workspace` takes `workspace: {memory_mb: …}`."""

    model: str = Field(default="openai/policy", min_length=1)
    """Name of the model for the harness. The part before the slash is the protocol that it speaks."""

    keep_trials: str | None = Field(default=None, min_length=1)
    """Folder in which Harbor's files of each trial stay; null: they are removed."""


class VerifiersSettings(BaseModel):
    """Settings of the agent `verifiers`: an episode of an environment of verifiers for each session."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    envs: dict[str, dict[str, Any]] = {}
    """Environments by a name of yours, each as verifiers' own `[env]`: `{taskset: {id: …}, agent: {harness: {id: …},
    runtime: {type: subprocess}}}`. A row names one of them in `extra_info.verifiers.env`."""

    paths: list[str] = []
    """Folders with task sets that are not installed in the interpreter `proxy.python`."""


class ProxySettings(BaseModel):
    """Settings of the agent loop `proxy_agent`: an agent of your own, trained through an OpenAI-compatible endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GONE: ClassVar = {
        "history": "earlier completions are shown as they were sampled: in a history rendered anew the model would be "
        "trained behind other tokens than it had sampled; leave it out"
    }

    agent: str | None = Field(default=None, min_length=1)
    """The agent, as `module:function`; `harbor`: a trial of Harbor; `verifiers`: an episode of an environment of
    verifiers; null: `command` is the agent."""

    command: list[str] | None = Field(default=None, min_length=1)
    """The agent as a command and its arguments, a process for each session; null: `agent` is the agent."""

    runner: Literal["thread", "process"] | None = None
    """Where an agent runs; null: in a thread if it takes the endpoint's address as an argument, else in a process."""

    python: str | None = Field(default=None, min_length=1)
    """The Python interpreter that imports `agent` and runs it, in processes; null: that of the run."""

    credit: Literal["session", "discounted", "completion"] = "session"
    """Reward that a completion learns from.

    - `session`: the session's score, compared with those of its group.
    - `discounted`: that, times `gamma` for each completion after it in its row.
    - `completion`: its own reward and, discounted by `gamma`, the mean of its continuations' ones. A completion without
      a continuation has the session's reward, too.
    """

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from a completion to the one that it continues."""

    max_rows: int = Field(default=16, gt=0)
    """The most rows of a session. Those with most trained tokens stay. More than 1 needs the estimator `mt_grpo`, or a
    function of your own."""

    max_completions: int = Field(default=256, gt=0)
    """The most completions of a session. Further requests are refused."""

    roles: list[str] | None = None
    """Names of the roles in which an agent asks; a request's `model` is one of them. null: there are none, and requests
    may name any model."""

    train: list[str] | None = None
    """The roles whose completions are trained; null: all. The text of the others is context."""

    opponents: dict[str, Annotated[list[Opponent], Field(min_length=1)]] = {}
    """Who else plays a role, by its name: one of the list is drawn for each session, and never trained.

    - a number: the checkpoint of this step of the run, once it is there; 0: the model that the run begins with;
    - a path: a model's folder; such a model and a checkpoint are served by SGLang beside the run;
    - an address such as `http://127.0.0.1:8000/v1`: an OpenAI-compatible endpoint, which serves one model;
    - `policy`: the model that is trained.

    While none of the list is there, the trained model plays. Where all trained roles have opponents, the trained model
    plays one of them in each session. It plays all trained roles in a validation.
    """

    opponent_devices: str | None = Field(default=None, min_length=1)
    """GPUs for the opponents' servers, as in CUDA_VISIBLE_DEVICES; null: they see none."""

    select: str | None = Field(default=None, min_length=1)
    """Function that selects the completions that are trained, as `module:function`; null: all that were delivered."""

    harbor: HarborSettings = HarborSettings()
    """Settings of the agent `harbor`."""

    verifiers: VerifiersSettings = VerifiersSettings()
    """Settings of the agent `verifiers`."""

    error_reward: float = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)
    """Reward of a session whose agent failed after it had got a completion. One that got none is invalid."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address at which the endpoint listens. Agents need the session's secret, also on other machines."""

    @field_validator("roles", "train")
    @classmethod
    def _are_names(cls, names: list[str] | None) -> list[str] | None:
        if names is None:
            return None
        if not names:
            raise ValueError("expected the name of at least one role; name one, or leave the setting out")
        if wrong := [name for name in names if not _ROLE.fullmatch(name)]:
            raise ValueError(
                f"{wrong[0]!r} cannot name a role: a name begins with a letter or a digit, and has at most 64 letters, "
                "digits, '.', '_' and '-'; use another one"
            )
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the role {twice!r} is there twice; leave one out")
        return names

    @field_validator("opponents")
    @classmethod
    def _are_opponents(cls, opponents: dict[str, list[Opponent]]) -> dict[str, list[Opponent]]:
        for role, listed in opponents.items():
            if negative := [each for each in listed if isinstance(each, int) and each < 0]:
                raise ValueError(f"{role}: {negative[0]} is no step; name one from 0, which is the first model")
            if "" in listed:
                raise ValueError(f"{role}: '' is no opponent; name a step, a folder, an address, or 'policy'")
            if set(listed) == {POLICY}:
                raise ValueError(f"{role}: 'policy' alone is the trained model, as without opponents; leave {role} out")
            if len(set(listed)) < len(listed):
                twice = next(each for each in listed if listed.count(each) > 1)
                raise ValueError(f"{role}: the opponent {twice!r} is there twice; leave one out")
        return opponents

    @model_validator(mode="after")
    def _has_opponents_of_roles(self) -> ProxySettings:
        if not self.opponents:
            if self.opponent_devices is not None:
                raise ValueError("proxy.opponent_devices is set, and proxy.opponents is not; leave it out")
            return self
        if self.roles is None:
            raise ValueError("proxy.opponents needs proxy.roles, which is not set; list the roles there")
        if strange := [role for role in self.opponents if role not in self.roles]:
            raise ValueError(f"proxy.opponents: {strange[0]!r} is no role; name some of proxy.roles={self.roles}")
        return self

    @model_validator(mode="after")
    def _trains_its_roles(self) -> ProxySettings:
        strange = [name for name in self.train or () if name not in (self.roles or ())]
        if strange == [USER]:
            raise ValueError(
                f"proxy.train: 'user' is no role of the agent's; list it in proxy.roles, or train the text of "
                f"PolicyUser by {PATH}.train=[{ASSISTANT},{USER}]"
            )
        if strange and self.roles is None:
            raise ValueError(f"proxy.train={self.train} needs proxy.roles, which is not set; list the roles there")
        if strange:
            raise ValueError(
                f"proxy.train: {strange[0]!r} is not a role; name some of proxy.roles={self.roles}, or leave train out"
            )
        return self


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


def with_derived(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a run's configuration with the state of its start-up check under `derived`.

    Folders of earlier versions have it among our settings. Code that reads the configuration of a folder calls this.

    Args:
        config: The whole configuration of a trainer, resolved.
    """
    keys = PATH.split(".")
    ours = _section(config, keys)
    if not isinstance(ours, Mapping) or not (old := DerivedSettings.model_fields.keys() & ours.keys()):
        return config
    written = ours.get("derived")  # of a folder that somebody else made it may be anything
    derived = {key: ours[key] for key in DerivedSettings.model_fields if key in old}
    derived |= written if isinstance(written, Mapping) else {}
    return _replaced(config, keys, {key: value for key, value in ours.items() if key not in old} | {"derived": derived})


def _replaced(config: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a configuration with another value under the keys, one within the other."""
    first, *others = keys
    return {**config, first: _replaced(config[first], others, value) if others else value}


def why_not_derived(written: str) -> str:
    """Return why a user's run may not have the state of the start-up check, and the remedy.

    A configuration that a run has saved has it, and is read: so code that composes one of a user's words calls this.

    Args:
        written: The setting with its value, as it was written.
    """
    return f"{written}: the start-up check writes it, and everything after it believes it; leave it out"


def names_in(section: str) -> list[str]:
    """Return the names of this package's settings in a section of the trainer's configuration.

    Args:
        section: Path of the section, for example `PATH`.
    """
    if section != PATH and not section.startswith(f"{PATH}."):
        return []
    model: Any = MultiTurnSettings
    for key in filter(None, section.removeprefix(PATH).split(".")):
        field = model.model_fields.get(key) if model is not None else None
        model = field and _model_of(field.annotation)
    return sorted(model.model_fields) if model is not None else []


def check_place(config: Mapping[str, Any]) -> None:
    """Refuse settings of this package in a place where nothing reads them, or under a name that is nearly theirs.

    Hydra takes any new path with a plus, and our pages write the path from `custom` on. A section beside ours, under
    whatever name, may be another plugin's, unless it has our settings.

    Args:
        config: The whole configuration of the trainer.

    Raises:
        ConfigError: There are such settings.
    """
    *parents, name = PATH.split(".")
    for place in (["custom"], ["rollout", "custom"]):
        if _section(config, [*place, name]) is not None:
            raise ConfigError(f"{'.'.join(place)}.{name}: nothing reads these settings here; write {PATH}.…")
    beside, ours = _section(config, parents), set(names_in(PATH))
    for key, section in beside.items() if isinstance(beside, Mapping) else ():
        is_near = key != name and difflib.get_close_matches(str(key).lower(), [name], cutoff=0.7)
        if is_near and isinstance(section, Mapping) and ours & set(map(str, section)):
            raise ConfigError(f"{'.'.join(parents)}.{key}: nothing reads these settings here; write {PATH}.…")


def _section(config: Any, keys: Sequence[str]) -> Any:
    """Return the value under nested keys; None without one."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def read_model(model: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """Read a mapping from a YAML file or from Hydra as a pydantic model.

    Args:
        model: Class of the model.
        raw: The mapping.
        where: Name of the mapping in errors, for example `tools.yaml: tools[0].config`.

    Raises:
        ConfigError: A key is unknown (the error names the nearest known one), or a value does not fit.
    """
    _refuse_switches(model, raw, where)
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        found = error.errors()
        # A key that is missing may only be misspelt.
        first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            *parents, last = first["loc"]
            owner = _nested(model, parents)
            if (why := why_gone(owner, last)) is not None:
                raise ConfigError(f"{where}.{key}={show(first['input'], 60)}: {why}") from None
            raise ConfigError(f"{where}.{key}: unknown setting; {_hint(owner, str(last))}") from None
        place = f"{where}.{key}" if key else where
        got = "nothing" if first["type"] == "missing" else show(first["input"], _SHOWN_CHARACTERS)
        if first["type"] == "model_type":
            known = sorted(_nested(model, first["loc"]).model_fields)
            raise ConfigError(f"{place}: expected a mapping, got {got}; known are {known}") from None
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        raise ConfigError(f"{place}: {problem}, got {got}") from None


def _hint(model: type[BaseModel], name: str) -> str:
    """Return a hint for an unknown setting: the nearest known one, or that it is gone."""
    known, gone = sorted(model.model_fields), getattr(model, "GONE", {})
    hint = did_you_mean(name, [*known, *gone]) or f"known are {known}"
    return " ".join([hint, *(f"{each!r} is gone: {why}" for each, why in gone.items() if repr(each) in hint)])


def why_gone(model: type[BaseModel], name: Any) -> str | None:
    """Return why a setting of an earlier version is gone, and the remedy; None: it never was one.

    Args:
        model: The model of the settings. Its `GONE` has the reasons, by the setting's name.
        name: The setting.
    """
    gone: Mapping[str, str] = getattr(model, "GONE", {})
    return gone.get(str(name))


def _refuse_switches(model: type[BaseModel], raw: Mapping[str, Any], where: str) -> None:
    """Refuse true and false for a number: pydantic takes them for 1 and 0, which their author does not mean."""
    for name, field in model.model_fields.items():
        value, kinds = raw.get(name), [field.annotation, *get_args(field.annotation)]
        if isinstance(value, bool) and (int in kinds or float in kinds) and bool not in kinds:
            raise ConfigError(f"{where}.{name}: expected a number, got {value}")
        inner = _model_of(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            _refuse_switches(inner, value, f"{where}.{name}")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model among the types of a field; None without one."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _nested(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """Return the model that a path of keys leads to, or the last model on the way to it."""
    for key in path:
        field = model.model_fields.get(str(key))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return model
        model = field.annotation
    return model
