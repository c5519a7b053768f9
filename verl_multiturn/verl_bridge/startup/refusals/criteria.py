"""Refusals about criteria for `rubric` that data rows bring, which are read when their conversations are scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import PROXY_LOOP, RECORDED_LOOP
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.startup.refusals.data_rows import columns_of, files_of, is_scored_otherwise
from verl_multiturn.verl_bridge.startup.view import RunView

_FILES = ("data.train_files", "data.val_files")
_SECTIONS = ("reward.custom_reward_function", "custom_reward_function")
_COLUMNS = ("data_source", "extra_info", "agent_name")
_RUBRIC, _CRITERIA = "rubric", "criteria"


class RubricRow(NamedTuple):
    """A data row that `rubric` scores."""

    place: str
    """Its setting, file and number."""
    criteria: Any
    """Its own criteria, as they are written; None without any."""
    is_agents: bool
    """Whether an agent behind the endpoint has it, which may give the reward itself."""


def validates(run: RunView) -> bool:
    """Return whether the rows of the validation are scored at all."""
    return bool((run.value("trainer.test_freq") or -1) > 0 or run.value("trainer.val_before_train"))


def rubric_options(run: RunView) -> Mapping[str, Any]:
    """Return the options of `rubric`; empty without any."""
    given = _options(run).get(_RUBRIC)
    return given if isinstance(given, Mapping) else {}


def rubric_rows(run: RunView, key: str) -> Iterator[RubricRow]:
    """Yield the rows of a setting's files that `rubric` scores.

    Args:
        run: The run.
        key: The setting.
    """
    from verl_multiturn.rewards.router import find_reward  # takes a while to import

    routes = _options(run).get("routes") or {}

    @cache
    def is_scored(source: str) -> bool:
        try:
            return find_reward(source, routes) == _RUBRIC
        except ConfigError:  # the reward function names it
            return False

    default = run.rollout.agent.default_agent_loop
    for path in files_of(run, key) or []:
        # Most files have no such row, and their extra_info is large.
        if path.suffix == ".parquet" and not any(is_scored(_source(row)) for row in columns_of(path, _COLUMNS[:1])):
            continue
        for number, row in enumerate(columns_of(path, _COLUMNS)):
            if is_scored(_source(row)):
                extra = row.get("extra_info")
                is_agents = (row.get("agent_name") or default) in (PROXY_LOOP, RECORDED_LOOP)
                given = extra.get(_CRITERIA) if isinstance(extra, Mapping) else None
                yield RubricRow(f"{key}: {path}: row {number}", given, is_agents)


def _source(row: Mapping[str, Any]) -> str:
    return str(row.get(_COLUMNS[0]))


def check_criteria(run: RunView) -> None:
    """Refuse a row that `rubric` scores and whose criteria it cannot read, or that has none.

    Raises:
        ConfigError: A row has such criteria; or it has none, the options have none, and no siblings are ranked.
    """
    from verl_multiturn.rewards.criteria import criteria_of

    if is_scored_otherwise(run) or not any(is_our_reward(run.config, section) for section in _SECTIONS):
        return
    options = rubric_options(run)
    may_lack = bool(options.get(_CRITERIA) or options.get("relative"))
    for key in _FILES[: 2 if validates(run) else 1]:
        for row in rubric_rows(run, key):
            if row.criteria is not None or not (may_lack or row.is_agents):
                criteria_of({_CRITERIA: row.criteria}, (), row.place)


def _options(run: RunView) -> Mapping[str, Any]:
    """Return the options of our reward function; empty where the run has another one."""
    for section in _SECTIONS:
        given = run.value(f"{section}.reward_kwargs")
        if is_our_reward(run.config, section) and OmegaConf.is_dict(given):
            plain: Any = OmegaConf.to_container(given, resolve=True)
            return plain if isinstance(plain, dict) else {}
    return {}
