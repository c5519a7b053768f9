"""Settings of agents of a user's own, under `proxy`: those of Harbor and verifiers are sections of it."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator, model_validator

from verl_multiturn.config.model import fixed
from verl_multiturn.config.names import ASSISTANT, PATH, POLICY, USER
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD

Opponent = StrictInt | StrictStr
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Name of a role: clients send it as a model's name, and it is a part of a metric's name."""


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
