"""`compute_score`: the reward function for verl, which finds the reward of a row by its `data_source`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.calls.loading.entry_points import installed_entry, is_reference
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.config import read_model
from verl_multiturn.describe import message_of, place_of, show
from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.rewards import gsm8k, gym, judge, mathematics, qa, relative, sql, tool_n1
from verl_multiturn.rewards import programs as code
from verl_multiturn.rewards.contract import GROUP, load_route, row_name
from verl_multiturn.rewards.gsm8k import Gsm8kOptions
from verl_multiturn.rewards.gym import GymOptions
from verl_multiturn.rewards.judge import JudgeOptions
from verl_multiturn.rewards.mathematics import MathOptions
from verl_multiturn.rewards.programs import CodeOptions
from verl_multiturn.rewards.qa import QaOptions
from verl_multiturn.rewards.rubric import RubricOptions
from verl_multiturn.rewards.score import RewardOptions, Score, Solution, compose, plain, with_verdicts
from verl_multiturn.rewards.sql import SqlOptions
from verl_multiturn.rewards.tool_n1 import ToolN1Options
from verl_multiturn.rows.reward_numbers import NoNumberError, UnusableNumberError, as_reward

logger = logging.getLogger(__name__)

Reward = Callable[[Solution, Any, Any], Awaitable[Score]]

REWARDS: dict[str, Reward] = {
    "gsm8k": gsm8k.reward,
    "math": mathematics.reward,
    "qa": qa.reward,
    "judge": judge.reward,
    "rubric": relative.reward,
    "sql": sql.reward,
    "code": code.reward,
    "tool_n1": tool_n1.reward,
    "reasoning_gym": gym.reward,
}
"""Built-in rewards by name; `RewardKwargs` has the options of each reward under the same name."""

ROUTES: dict[str, str] = {
    **dict.fromkeys(["openai/gsm8k", "gsm8k*"], "gsm8k"),
    **dict.fromkeys(
        ["math*", "*/math*", "aime*", "*/aime*", "amc*", "numina*", "olympiad*", "*/geometry3k"],
        "math",
    ),
    **dict.fromkeys(["searchr1_*", "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique"], "qa"),
    "bamboogle": "qa",
    "deepeyes/*": "judge",
    "rubric/*": "rubric",
    **dict.fromkeys(["skyrl_sql*", "skyrl-sql*", "synsql*", "spider*", "bird*", "sql*"], "sql"),
    **dict.fromkeys(
        ["taco*", "apps*", "codecontests*", "codeforces*", "livecodebench*", "mbpp*", "humaneval*"], "code"
    ),
    **dict.fromkeys(["primeintellect*", "deepcoder*"], "code"),
    **dict.fromkeys(["tool_n1*", "tool-n1*", "toolcall*"], "tool_n1"),
    "reasoning_gym/*": "reasoning_gym",
}
"""Patterns of `data_source`, in lower case, with the name of each one's reward; the first that matches counts."""

# Arguments that verl adds when there is a reward model.
_OF_VERL = ("reward_router_address", "reward_model_tokenizer")


class RewardKwargs(BaseModel):
    """Options in `reward.custom_reward_function.reward_kwargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    routes: dict[str, str] = {}
    """Patterns of `data_source` with the name of each one's reward, tried before the built-in patterns in this order.

    The name is that of a built-in reward, the dotted name of a function of your own, or the reference of an installed
    package's function, `package/name`. In a pattern `*` matches any text; letter case is ignored.
    """

    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for one call of a function of your own; the built-in rewards have time limits of their own."""

    gsm8k: Gsm8kOptions = Gsm8kOptions()
    math: MathOptions = MathOptions()
    qa: QaOptions = QaOptions()
    judge: JudgeOptions = JudgeOptions()
    rubric: RubricOptions = RubricOptions()
    sql: SqlOptions = SqlOptions()
    code: CodeOptions = CodeOptions()
    tool_n1: ToolN1Options = ToolN1Options()
    reasoning_gym: GymOptions = GymOptions()

    @property
    def has_rubric(self) -> bool:
        """Return whether reports have verdicts of criteria: those of every row then, since verl wants the same keys."""
        return self.rubric.url is not None


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **reward_kwargs: Any,
) -> dict[str, Any]:
    """Score one row, as verl's reward function; see `docs/write/rewards.md`.

    Args:
        data_source: The row's data source, which decides the reward.
        solution_str: The decoded response, tool output included. The assistant's own text is taken from it only when
            `extra_info` has no `assistant_texts`; our agent loop puts these there. (`tool_n1` also reads calls in it.)
        ground_truth: The row's ground truth, in the form that the reward needs.
        extra_info: The row's `extra_info`, with the entries that the agent loop added.
        reward_kwargs: Options, as in `RewardKwargs`.

    Returns:
        `score`, `acc`, `format`, `answered`, `timed_out`, `failed`, `outage` and `unjudgeable`; every row has
        all these keys. Where `rubric` has a `url` there are also `verdicts` and `turn_values`, see `with_verdicts`.

    Raises:
        ConfigError: The author of the data or the configuration made a mistake: there is no reward for the data source,
            an option is unknown, or the ground truth has another form. Nothing that a model wrote raises an error.
    """
    kwargs = read_reward_kwargs(reward_kwargs)
    name = find_reward(data_source, kwargs.routes)
    solution = Solution.of_row(data_source, solution_str, extra_info)
    row = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    try:
        if name in REWARDS:
            options: RewardOptions = getattr(kwargs, name)
            score = await REWARDS[name](solution, plain(ground_truth), options)
        else:
            options = RewardOptions()
            score = await _run_own(name, solution, plain(ground_truth), kwargs.timeout_s)
            if (score.verdicts or score.turn_values) and not kwargs.has_rubric:  # verl wants the same keys of each row
                raise ConfigError(
                    f"{name} returned a Score with verdicts or turn_values, which are used only where rubric.url is "
                    "set; return them as JSON from a function in the place of compute_score"
                )
        score = replace(score, value=as_reward(score.value))
    except NoNumberError as error:
        raise ConfigError(f"{name} returned a Score whose value is no number: {error}") from None
    except ConfigError:
        raise
    except TimeoutError:
        score = Score(answered=1.0, timed_out=1.0)
    except Exception as error:  # a model's text must not end the run: count it, and log the first of each kind
        written = WrittenTexts((solution_str,), (plain(ground_truth), plain(extra_info)))
        outage = cause_of(error, "model", written=written) == "outage"
        unjudgeable = isinstance(error, UnjudgedError)
        score = Score(answered=1.0, failed=1.0, outage=float(outage), unjudgeable=float(unjudgeable))
        _warn_once(name, f"failed with {type(error).__name__}", f": {message_of(error)}{place_of(error)}", row)
    if score.timed_out:
        _warn_once(name, "ran out of time", "", row)
    report = compose(score, solution, options)
    return with_verdicts(report, score) if kwargs.has_rubric else dict(report)


def read_reward_kwargs(raw: Mapping[str, Any]) -> RewardKwargs:
    """Read and check the options of `compute_score`.

    Args:
        raw: The options, as verl passes them.

    Raises:
        ConfigError: A key is unknown (the message names the nearest known one), or a value does not fit.
    """
    return _read(json.dumps({key: plain(value) for key, value in raw.items() if key not in _OF_VERL}, default=str))


@functools.lru_cache(maxsize=16)  # the options are the same for every row
def _read(raw: str) -> RewardKwargs:
    kwargs = check_reward_kwargs(json.loads(raw), "reward_kwargs")
    for pattern, name in kwargs.routes.items():
        if name not in REWARDS:
            load_route(name, f"reward_kwargs.routes[{pattern!r}]")
    return kwargs


def check_reward_kwargs(raw: Mapping[str, Any], where: str) -> RewardKwargs:
    """Check the options of `compute_score`, for the start-up check too, and import none of the user's functions.

    Args:
        raw: The options, as YAML has them.
        where: Their place, for errors.

    Raises:
        ConfigError: A key is unknown (the message names the nearest known one), or a value does not fit.
    """
    kwargs = read_model(RewardKwargs, raw, where)
    for pattern, name in kwargs.routes.items():
        if name not in REWARDS and is_reference(name):
            installed_entry(name, GROUP, f"{where}.routes[{pattern!r}]")
        elif name not in REWARDS and "." not in name:
            raise ConfigError(
                f"{where}.routes[{pattern!r}]: {name!r} is no reward; known are {sorted(REWARDS)}, or write "
                "the dotted name of a function of your own, or the reference of an installed one, 'package/name'"
            )
    return kwargs


def find_reward(data_source: str, routes: Mapping[str, str]) -> str:
    """Return the name of the reward for a data source.

    Args:
        data_source: The row's data source.
        routes: The user's patterns, which are tried before `ROUTES`.

    Raises:
        ConfigError: No pattern matches the data source.
    """
    for pattern, name in [*routes.items(), *ROUTES.items()]:
        if fnmatchcase(str(data_source).lower(), pattern.lower()):
            return name
    known = list(dict.fromkeys([*routes, *sorted(ROUTES)]))
    raise ConfigError(
        f"data_source {data_source!r} has no reward; known are {known}. Name one with "
        f"+reward.custom_reward_function.reward_kwargs.routes='{{{data_source}: REWARD}}', where REWARD is one of "
        f"{sorted(REWARDS)} or the dotted name of a function of your own"
    )


async def _run_own(name: str, solution: Solution, ground_truth: Any, timeout_s: float) -> Score:
    """Call a user's own `reward(solution, ground_truth)`.

    A function that is not a coroutine function runs in a thread. Nothing can stop a thread: a late one goes on.
    """
    function = resolve(name, "reward_kwargs.routes", GROUP)
    async with asyncio.timeout(timeout_s):
        if inspect.iscoroutinefunction(function):
            score = await function(solution, ground_truth)
        else:
            score = await asyncio.to_thread(function, solution, ground_truth)
    if inspect.iscoroutine(score):
        score.close()  # Python would warn of one that was not awaited
        raise ConfigError(
            f"{name} returned a coroutine that nobody awaits; write it with async def, or await it inside"
        )
    if not isinstance(score, Score):
        raise ConfigError(
            f"{name} returned {show(score)}; expected a verl_multiturn.rewards.Score: {_as_score(score)} on every path"
        )
    return score


def _as_score(value: Any) -> str:
    """Return what to write in the place of a value that is no `Score`, as in `return Score(value=0.5)`."""
    try:
        return f"return Score(value={as_reward(value):g})"
    except (NoNumberError, UnusableNumberError):
        return "return Score(value=…), or Score() for no answer,"


_warned: set[tuple[str, str]] = set()


def _warn_once(name: str, what: str, detail: str, row: Mapping[str, Any]) -> None:
    if (name, what) not in _warned:
        _warned.add((name, what))
        logger.warning("reward %r %s%s, for %s; further ones are only counted", name, what, detail, row_name(row))
