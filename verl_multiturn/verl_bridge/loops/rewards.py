"""The reward of a finished conversation: the caller of verl's reward manager, and the effect of its outage.

    training     Rewards ─▶ verl's worker ─▶ NearRewards ─┬─ here  LocalRewards
                                                          └─ else  a reward worker, by a call of Ray
    evaluation   Judge ──▶ Rewards ──▶ LocalRewards
    replay       Scores ──────────────▶ LocalRewards

    `Rewards`: a verdict                        the row is written
               `outage` of the reward function  reported to the run's keeper under the name `reward`
                 ├─ of this row alone           the row is written, and left out by the trainer
                 └─ the breaker is open         the row waits for its end, and is scored again

A reward worker knows no keeper of the run, so the agent-loop worker watches over it. A call of Ray costs more than a
quick rule: the row is pickled, waits for its place in another process, and comes back.

Invariants:
- reward code gets copies of the row's fields, as in a reward worker: its changes are seen nowhere else;
- the manager, the function, the data and so the results are those of a reward worker, and so are their exceptions;
- a row waits for its reward alone: the conversation has ended, and its tools are released;
- a row that was scored again has the last verdict; one that waited for too long keeps the one that it had. Without any
  it scores 0, and has the keys of other rows with the mark of an outage: the trainer leaves it out.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.guarded_call import GuardedCall, ask_through
from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.describe import describe, message_of
from verl_multiturn.errors import ConfigError, OutageError, RewardContractError, UnjudgedError
from verl_multiturn.rewards.contract import call_problem, require_rewards
from verl_multiturn.rewards.router import find_reward, read_reward_kwargs
from verl_multiturn.rewards.score import RewardOptions, Score, Solution, compose, with_verdicts
from verl_multiturn.verl_bridge.loops.output import OUTAGE, UNJUDGEABLE, CertifiedOutput
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.names import REWARD_MANAGERS, STATELESS_MANAGERS
from verl_multiturn.verl_bridge.settings import is_our_reward, settings_of

logger = logging.getLogger(__name__)

NAME = "reward"
"""Name of the reward workers' outages."""
_LEASE_S = 600.0
"""Seconds after which a reward that was tried while the breaker is open counts as failed."""
_OURS = compose(Score(answered=1.0, failed=1.0, outage=1.0), Solution("", ()), RewardOptions())
"""The report of the rewards in the box on an outage."""
QUICK = frozenset({"gsm8k", "qa", "tool_n1"})
"""Rewards in the box that only compare texts: they start no process, send no request, and wait for nothing."""
_FUNCTION = "reward.custom_reward_function"


class Rewards:
    """The rewards of one agent-loop worker.

    Args:
        outages: The outages that this process knows.
        has_verdicts: Whether each report of the reward function has verdicts of criteria.
    """

    def __init__(self, outages: Outages, has_verdicts: bool = False) -> None:
        self._watch = outages.of(NAME, OutageLimits(), _LEASE_S) if outages.settings.mode == "pause" else None
        self._without_verdict: dict[str, Any] = with_verdicts(_OURS, Score()) if has_verdicts else _OURS
        """The report of a row without a verdict: as the rewards in the box, until another row's keys are known."""

    async def score(self, outputs: Sequence[Any], compute: Callable[[], Awaitable[None]]) -> None:
        """Compute the reward of a conversation, again after an outage.

        A function that raises `OutageError` or `UnjudgedError` gives no verdict: the trainer leaves the row out.

        Args:
            outputs: The conversation's rows; the last one gets the reward, unless it has one.
            compute: Computes it, as verl does.

        Raises:
            RewardContractError: The reward function made a mistake, which ends the run.
        """
        if not outputs or outputs[-1].reward_score is not None:
            await compute()
            return
        last = outputs[-1]
        if self._watch is None:
            await self._compute(last, compute)
            return
        watched = GuardedCall(self._watch, str(getattr(last, "stats", {}).get("request_id", id(last))), "reward")

        async def ask() -> OutageError | None:
            last.reward_score = None  # verl computes none where there is one
            await self._compute(last, compute)
            return OutageError("the reward function could not judge a conversation") if _is_outage(last) else None

        try:
            await ask_through(watched, ask)
        except OutageEndError:
            if last.reward_score is None:
                last.reward_score = 0.0
                last.extra_fields["reward_extra_info"] = dict(self._without_verdict)

    async def judge_together(
        self, conversations: Sequence[Sequence[Any]], name: str, ask: Callable[[], Awaitable[None]]
    ) -> None:
        """Ask for a verdict on several conversations at once, again after an outage; without one none of them has any.

        Args:
            conversations: Their rows; the last row of each gets the mark of an outage.
            name: Name of the question in reports of outages.
            ask: Asks, and hands the verdict over in its own way. It raises what a reward function may raise.

        Raises:
            RewardContractError: The author of the data or of the configuration made a mistake, which ends the run.
        """
        together = SimpleNamespace(reward_score=None, extra_fields={}, stats={"request_id": name})

        async def asked() -> None:
            together.extra_fields.clear()
            await ask()

        await self.score([together], asked)
        for last in (rows[-1] for rows in conversations if together.extra_fields):
            last.reward_score = 0.0
            last.extra_fields["reward_extra_info"] = dict(together.extra_fields["reward_extra_info"])

    async def _compute(self, last: Any, compute: Callable[[], Awaitable[None]]) -> None:
        """Compute the reward of a conversation once; one without a verdict scores 0, and has the reason."""
        try:
            await compute()
        except ConfigError as error:
            # Ray's error of a reward worker has a traceback for its text, and the error that was raised as its cause.
            raise RewardContractError(message_of(getattr(error, "cause", error))) from error
        except (OutageError, UnjudgedError) as error:
            mark = OUTAGE if isinstance(error, OutageError) else UNJUDGEABLE
            last.reward_score = 0.0
            last.extra_fields["reward_extra_info"] = {**self._without_verdict, OUTAGE: 0.0, mark: 1.0}
            _tell_once(mark, describe(getattr(error, "cause", error)))
            return
        self._note_keys(last)

    def _note_keys(self, output: Any) -> None:
        """Note the keys of the reward function's report; verl and the metrics ask the same keys of every row."""
        if reported := output.extra_fields.get("reward_extra_info"):
            nothing = {key: "" if isinstance(value, str) else 0.0 for key, value in reported.items()}
            self._without_verdict = {**{key: _OURS.get(key, value) for key, value in nothing.items()}, OUTAGE: 1.0}


@functools.cache
def _tell_once(mark: str, why: str) -> None:
    """Log once why rows have no verdict."""
    logger.warning("the reward function could not judge a conversation, which counts as %s: %s (said once)", mark, why)


def _is_outage(output: Any) -> bool:
    found = (output.extra_fields.get("reward_extra_info") or {}).get(OUTAGE, 0)
    return isinstance(found, int | float) and found > 0


class LocalRewards:
    """verl's reward manager in this process, whose reward function is checked, and which gets a copy of each row.

    A manager that calls its function elsewhere (`remote`), or that calls none, is checked by its result alone
    (`output.py`). A manager belongs to the event loop in which it is made.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer.

    Raises:
        Exception: Whatever the file of a reward function raises, which is its author's code.
    """

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        further = {"reward_router_address": None, "reward_model_tokenizer": None}
        self._manager = _with_check(load_reward_manager(config, tokenizer, **further))

    def run_single(self, data: DataProto) -> Awaitable[dict[str, Any]]:
        """Ask the manager for the reward of a conversation, as a reward worker does.

        Args:
            data: Its rows, as verl's worker makes them; the last one is scored. verl's managers write into them.
        """
        data.non_tensor_batch = copy.deepcopy(data.non_tensor_batch)
        result: Awaitable[dict[str, Any]] = self._manager.run_single(data)
        return result

    async def score(self, columns: Mapping[str, Any], outputs: Sequence[CertifiedOutput]) -> None:
        """Enter the reward of a conversation into its last row, as verl's worker does; one that is there stays.

        Args:
            columns: Fields of its data row.
            outputs: Its rows, in order.
        """
        last = outputs[-1]
        if last.reward_score is None:
            result = await self.run_single(scored_rows(columns, outputs))
            last.reward_score = result["reward_score"]
            last.extra_fields["reward_extra_info"] = result["reward_extra_info"]


class NearRewards:
    """Replacement of verl's handle of a reward worker in an agent-loop worker: quick rewards are computed here.

    Args:
        config: verl's whole configuration.
        tokenizer: The model's tokenizer.
        workers: Handles of the reward workers, which judge the other rows.
    """

    def __init__(self, config: DictConfig, tokenizer: Any, workers: Sequence[Any]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._workers = workers
        self._all = settings_of(config.actor_rollout_ref.rollout).near_rewards == "all"
        get_custom_reward_fn(config)  # imports the function's modules, before conversations could wait for them
        self.compute_score = self  # verl asks `handle.compute_score.remote(data)`

    @classmethod
    def handles(cls, config: DictConfig, tokenizer: Any, workers: Sequence[Any] | None) -> Sequence[Any] | None:
        """Return the handles that verl's worker asks for rewards.

        Args:
            config: verl's whole configuration.
            tokenizer: The model's tokenizer.
            workers: Handles of the reward workers; None: rewards are not requested here.
        """
        mode = settings_of(config.actor_rollout_ref.rollout).near_rewards
        if workers is None or mode == "off":
            return workers
        manager = config.reward.reward_manager
        is_stateless = manager.source == "register" and manager.name in STATELESS_MANAGERS
        has_model = OmegaConf.select(config, "reward.reward_model.enable")
        if has_model or not is_stateless or (mode == "quick" and not is_our_reward(config)):
            return workers
        return [cls(config, tokenizer, workers)]

    @cached_property
    def _local(self) -> LocalRewards:
        return LocalRewards(self._config, self._tokenizer)

    def remote(self, data: Any) -> Awaitable[dict[str, Any]]:
        """Judge a conversation, here or in a reward worker.

        Args:
            data: verl's `DataProto` of its rows.
        """
        if not self._is_near(data.non_tensor_batch["data_source"][-1]):
            asked: Awaitable[dict[str, Any]] = random.choice(self._workers).compute_score.remote(data)
            return asked
        return self._local.run_single(data)

    def _is_near(self, data_source: Any) -> bool:
        if self._all:
            return True
        try:
            return reward_of(self._config, data_source) in QUICK
        except ConfigError:  # the reward worker raises it
            return False


def reward_of(config: DictConfig, data_source: str) -> str:
    """Return the name of the reward that our reward function has for a data source.

    Args:
        config: verl's whole configuration.
        data_source: The row's data source.

    Raises:
        ConfigError: There is none, or an option is unknown.
    """
    options = read_reward_kwargs(plain_dict(OmegaConf.select(config, f"{_FUNCTION}.reward_kwargs")))
    return find_reward(data_source, options.routes)


def require_callable(config: DictConfig) -> None:
    """Refuse a reward function that could not be called: one of a route, or one in the place of `compute_score`.

    A run's start asks the same in a process of its own (`startup/own_code.py`).

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: One of a route cannot be imported either.
    """
    options = plain_dict(OmegaConf.select(config, f"{_FUNCTION}.reward_kwargs"))
    manager = config.reward.reward_manager
    if is_our_reward(config):
        read_reward_kwargs(options)
    elif manager.source == "register" and manager.name in REWARD_MANAGERS:
        function = get_custom_reward_fn(config)
        if function is not None and (problem := call_problem(function.args[0], options)):
            raise ConfigError(f"{_FUNCTION}.name={config.reward.custom_reward_function.name!r}: {problem}")


def share_score(outputs: Sequence[AgentLoopOutput]) -> None:
    """Give all rows of a conversation the score of the last one, as verl does; `as_dict` of ours leaves it to the last.

    Args:
        outputs: Its rows, in order, of any agent loop.
    """
    last = outputs[-1]
    if last.reward_score is None:
        return
    for output in outputs[:-1]:
        output.reward_score = last.reward_score
        output.extra_fields["reward_extra_info"] = last.extra_fields["reward_extra_info"]


def check_workers(workers: Sequence[Any]) -> None:
    """Check the reward functions of verl's reward workers from now on.

    Args:
        workers: Ray's handles of them.
    """
    ray.get([worker.__ray_call__.remote(_check_worker) for worker in workers])


def _check_worker(worker: Any) -> None:
    _with_check(worker.reward_manager)


def _with_check(manager: Any) -> Any:
    if callable(function := getattr(manager, "compute_score", None)):
        manager.compute_score = require_rewards(function)
    return manager


def scored_rows(columns: Mapping[str, Any], outputs: Sequence[CertifiedOutput]) -> DataProto:
    """Return the rows of a conversation as verl's reward manager gets them (`run_single`).

    Args:
        columns: Fields of its data row; each row has them.
        outputs: Its rows, in order. The last one is scored.
    """
    prompts = [torch.tensor(output.prompt_ids, dtype=torch.int64) for output in outputs]
    responses = [torch.tensor(output.response_ids, dtype=torch.int64) for output in outputs]
    input_ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    held = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "attention_mask": [torch.ones_like(ids) for ids in input_ids],
    }
    batch = {name: pad_sequence(column, batch_first=True, padding_value=0) for name, column in held.items()}
    told: dict[str, list[Any]] = {name: [value] * len(outputs) for name, value in columns.items()}
    told["__num_turns__"] = [output.num_turns for output in outputs]
    told["tool_extra_fields"] = [output.extra_fields for output in outputs]
    told["prompt_len"] = [len(output.prompt_ids) for output in outputs]
    told["response_len"] = [len(output.response_ids) for output in outputs]
    return DataProto(
        batch=TensorDict(batch, batch_size=len(outputs)),
        non_tensor_batch={name: _objects(values) for name, values in told.items()},
    )


def _objects(values: Sequence[Any]) -> Any:
    """Return values as an array of objects; numpy would make arrays of lists."""
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        column[place] = value
    return column
