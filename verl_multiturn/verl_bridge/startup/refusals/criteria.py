"""Refusals about criteria for `rubric` that data rows bring, which are read when their conversations are scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow.parquet
from omegaconf import OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.files import read_rows
from verl_multiturn.verl_bridge.names import PROXY_LOOP, RECORDED_LOOP
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.startup.refusals.data_rows import files_of
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
    default = run.rollout.agent.default_agent_loop
    for path in files_of(run, key) or []:
        if path.suffix == ".parquet":
            known = [name for name in _COLUMNS if name in pyarrow.parquet.read_schema(path).names]
            rows = pyarrow.parquet.read_table(path, columns=known).to_pylist()
        else:
            rows = read_rows(path, [path.suffix])
        for number, row in enumerate(rows):
            try:
                is_scored = find_reward(str(row.get("data_source")), routes) == _RUBRIC
            except ConfigError:  # the reward function names it
                continue
            if is_scored:
                extra = row.get("extra_info")
                is_agents = (row.get("agent_name") or default) in (PROXY_LOOP, RECORDED_LOOP)
                given = extra.get(_CRITERIA) if isinstance(extra, Mapping) else None
                yield RubricRow(f"{key}: {path}: row {number}", given, is_agents)


def check_criteria(run: RunView) -> None:
    """Refuse a row that `rubric` scores and whose criteria it cannot read, or that has none.

    Raises:
        ConfigError: A row has such criteria; or it has none, the options have none, and no siblings are ranked.
    """
    from verl_multiturn.rewards.criteria import criteria_of

    if not any(is_our_reward(run.config, section) for section in _SECTIONS):
        return
    options = rubric_options(run)
    may_lack = bool(options.get(_CRITERIA) or options.get("relative"))
    for key in _FILES:
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
