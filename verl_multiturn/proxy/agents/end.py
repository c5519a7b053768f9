"""How an agent ended, what its result means, and which reward follows.

An agent's result is one of:
- a number, the reward of the session, as `reward_numbers.py` reads it;
- `{"reward": 1.0, "completions": {"chatcmpl-…": 0.5}}`, each part of which may be omitted. `completions` has rewards
  of single completions, by the id that the agent saw;
- `{"roles": {"white": 1.0, "black": -1.0}}`, a reward for each role (`proxy.roles`), with or without `completions`. A
  single number is the reward of each role;
- None: `compute_score` decides.

An agent that was written for AReaL may also return `{"chatcmpl-…": 0.5}`, rewards of completions alone. The session's
reward is then their sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_multiturn.describe import show
from verl_multiturn.errors import AgentContractError
from verl_multiturn.rows.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward

EndKind = Literal["returned", "raised", "exited", "timed_out", "stuck", "failed", "outage", "unjudged", "misconfigured"]
_EXPECTED = "a number, {'reward': …, 'completions': {id: number}}, {'roles': {name: number}} or None"
_MOST_PROBLEM = 4_000


@dataclass(frozen=True)
class AgentResult:
    """The rewards that an agent returned."""

    reward: float | None = None
    """Reward of the session; None: `compute_score` decides."""
    completions: Mapping[str, float] = field(default_factory=dict)
    """Rewards of completions, by the ids that the agent saw."""
    by_id: bool = False
    """Whether it returned rewards of completions alone, in AReaL's form: their sum is the session's reward."""
    roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards by role; empty: `reward` is that of each role."""


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent's run.

    Kinds:
    - `returned`: it returned, or its command ended with status 0;
    - `raised`: it raised an error;
    - `exited`: its command ended with another status, or its process ended in the middle;
    - `timed_out`: the session's time was up;
    - `stuck`: the time was up, and its thread still runs: nothing can end a thread;
    - `failed`: there was no process or thread for it;
    - `outage`: it reported that a service is not there (`calls/outages/causes.py`);
    - `unjudged`: it reported that the result cannot be scored (`UnjudgedError`);
    - `misconfigured`: it reported that a setting or its row is wrong (`ConfigError`).
    """

    kind: EndKind
    result: AgentResult = AgentResult()
    """Its return value; empty for all other kinds."""
    problem: str = ""
    """Error, in a text of bounded length."""

    def __post_init__(self) -> None:
        text = self.problem.encode("utf-8", "backslashreplace").decode()
        object.__setattr__(self, "problem", text if len(text) <= _MOST_PROBLEM else f"…{text[-_MOST_PROBLEM:]}")


def session_reward(end: AgentEnd, error_reward: float) -> float | None:
    """Return the reward of a session that counts; None where `compute_score` decides.

    An agent that fails after it got a completion may have failed because of it. So the session is trained, with
    `error_reward`. One that got none before it failed does not count: see `endpoint.stop_reason`.
    """
    return end.result.reward if end.kind == "returned" else error_reward


def role_rewards(end: AgentEnd, roles: Sequence[str], trained: Collection[str]) -> Mapping[str, float]:
    """Return the rewards of a session by role, as its agent gave them; empty where it gave none, or failed.

    Args:
        end: The agent's end.
        roles: Names of all roles; empty: there are none.
        trained: Names of the roles that are trained and have a completion that was delivered.

    Raises:
        AgentContractError: A name is no role, or a trained role that spoke has no reward.
    """
    rewards = end.result.roles
    if not rewards:
        return {}
    if strange := [name for name in rewards if name not in roles]:
        known = f"roles are {list(roles)}" if roles else "proxy.roles is not set"
        raise AgentContractError(
            f"the agent returned a reward for the role {show(strange[0], 100)}, and {known}; use the names that "
            "proxy.roles has"
        )
    if silent := [name for name in trained if name not in rewards]:
        raise AgentContractError(
            f"the agent returned rewards for the roles {sorted(rewards)}, and none for {silent[0]!r}, which is trained "
            "and has spoken; give it one, also if it is 0"
        )
    return rewards


def read_result(value: object, is_areals: bool = False) -> AgentResult:
    """Read an agent's return value.

    Args:
        value: The returned value.
        is_areals: Whether it was written for AReaL, so that a mapping has rewards by the completion's id.

    Raises:
        AgentContractError: It is not a reward, or one cannot be used.
    """
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        return AgentResult(_number(value, value))
    if value and not set(value) <= {"reward", "completions", "roles"}:
        if not is_areals:
            raise AgentContractError(f"the agent returned {show(value)}, expected {_EXPECTED}; correct its return")
        return AgentResult(0.0, _by_id(value, value), by_id=True)  # the score adds the completions' rewards
    reward, rewards, roles = value.get("reward"), value.get("completions"), value.get("roles")
    for name, given in (("completions", rewards), ("roles", roles)):
        if given is not None and not isinstance(given, Mapping):
            keys = "ids" if name == "completions" else "roles"
            raise AgentContractError(
                f"the agent returned {show(value)}, expected a mapping from {keys} to numbers as {name!r}; correct its "
                "return"
            )
    if roles is not None and reward is not None:
        raise AgentContractError(
            f"the agent returned {show(value)}, whose 'reward' would be that of each role, beside 'roles'; leave one "
            "of the two out"
        )
    if roles is not None and not roles:
        raise AgentContractError(
            f"the agent returned {show(value)}, whose 'roles' is empty; give each role its reward, or leave it out"
        )
    return AgentResult(
        None if reward is None else _number(reward, value),
        _by_id(rewards or {}, value),
        roles=_by_role(roles or {}, value),
    )


def _by_id(rewards: Mapping[Any, object], whole: object) -> dict[str, float]:
    return _by_name(rewards, whole, "the ids of completions", "take them from the answers")


def _by_role(rewards: Mapping[Any, object], whole: object) -> dict[str, float]:
    return _by_name(rewards, whole, "names of roles", "take them from proxy.roles")


def _by_name(rewards: Mapping[Any, object], whole: object, names: str, remedy: str) -> dict[str, float]:
    for key in rewards:
        if not isinstance(key, str):
            raise AgentContractError(
                f"the agent returned {show(whole)}, expected {names}, not {show(key, 60)}; {remedy}"
            )
    return {key: _number(reward, whole) for key, reward in rewards.items()}


def _number(value: object, whole: object) -> float:
    try:
        return as_reward(value)
    except NoNumberError:
        raise AgentContractError(
            f"the agent returned {show(whole)}, expected {_EXPECTED}; correct its return"
        ) from None
    except UnusableNumberError:
        raise AgentContractError(
            f"the agent returned {show(whole)}, whose reward is no {USABLE}; correct its return"
        ) from None
