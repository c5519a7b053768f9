"""The refusal of rows that our `compute_score` has no reward for, which it says when their conversations are over."""

from __future__ import annotations

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import AGENT_LOOP, LOOPS_OF_VERL
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.startup.refusals.criteria import validates
from verl_multiturn.verl_bridge.startup.refusals.data_rows import columns_of, files_of, is_scored_otherwise
from verl_multiturn.verl_bridge.startup.view import RunView

_FILES = ("data.train_files", "data.val_files")
_SECTIONS = ("reward.custom_reward_function", "custom_reward_function")
_COLUMNS = ("data_source", "agent_name")


def check_data_sources(run: RunView) -> None:
    """Refuse a row whose `data_source` has no reward in our `compute_score`, neither by `routes` nor in the box.

    Raises:
        ConfigError: There is such a row; the message names it, the known patterns and the option.
    """
    section = next((each for each in _SECTIONS if is_our_reward(run.config, each)), None)
    if section is None or not run.is_v1 or is_scored_otherwise(run):
        return
    from verl_multiturn.rewards.router import find_reward  # takes a while to import

    routes = run.value(f"{section}.reward_kwargs.routes") or {}
    default = run.rollout.agent.default_agent_loop
    known: set[str] = set()
    for key in _FILES[: 2 if validates(run) else 1]:
        for path in files_of(run, key) or []:
            for index, row in enumerate(columns_of(path, _COLUMNS)):
                source = str(row.get("data_source"))
                if source in known or (row.get("agent_name") or default) not in {AGENT_LOOP, *LOOPS_OF_VERL}:
                    continue  # another loop may give the reward itself
                try:
                    find_reward(source, routes)
                except ConfigError as error:
                    raise ConfigError(f"{key}: {path}: row {index}: {error}") from None
                known.add(source)
