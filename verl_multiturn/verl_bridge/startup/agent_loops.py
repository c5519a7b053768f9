"""The agent loops of a run, as far as its configuration and its data files tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError

AGENT_LOOP = "multiturn_agent"
"""Our agent loop of conversations with tools."""
PROXY_LOOP = "proxy_agent"
"""Our agent loop of agents behind an endpoint."""
OUR_LOOPS = frozenset({AGENT_LOOP, PROXY_LOOP})
ROLLOUT = "sglang_async"
"""Our `rollout.name`."""
MANAGER = "verl_multiturn.verl_bridge.manager.MultiTurnManager"
"""Our `rollout.agent.agent_loop_manager_class`."""


def only_our_loop(config: DictConfig) -> bool:
    """Tell whether every row that is trained on is known to come from an agent loop of ours."""
    loops, known = agent_loops(config, ("train_files",))
    return known and loops <= OUR_LOOPS


def agent_loops(config: DictConfig, files: Sequence[str] = ("train_files", "val_files")) -> tuple[set[str], bool]:
    """Return the agent loops that this run uses, and whether they are known for sure.

    A row's loop is its `agent_name`; without that column the default loop. A data set class of the user's own, a
    folder, a JSON or JSONL file and a remote file are not looked into; the loops are then not known for sure.
    """
    agent = config.actor_rollout_ref.rollout.agent
    default = agent.default_agent_loop
    loops: set[str] = set()
    known = not OmegaConf.select(config, "data.custom_cls.path")
    for key in files:
        listed = OmegaConf.select(config, f"data.{key}")
        for file in [listed] if isinstance(listed, str) else list(listed or []):
            names = _agent_names(str(file))
            known = known and names is not None
            loops |= names or {default}
    loops = loops or {default}
    registered = set(_agent_loop_registry) | OUR_LOOPS
    if known and not own_loops(agent) and (unknown := sorted(loops - registered, key=str)):
        hint = did_you_mean(str(unknown[0]), sorted(registered)) or f"known are {sorted(registered)}"
        raise ConfigError(
            f"unknown agent loop {unknown[0]!r} in rollout.agent.default_agent_loop or the column agent_name; {hint}"
        )
    return loops, known


def own_loops(agent: DictConfig) -> bool:
    """Tell whether the run has agent loops of the user's own."""
    return bool(agent.agent_loop_config_path) or own_manager(agent) is not None


def own_manager(agent: DictConfig) -> str | None:
    """Return the agent-loop manager of the user's own; None when verl's or ours runs."""
    manager: str | None = agent.get("agent_loop_manager_class")
    return None if manager in (None, "", MANAGER) else manager


def _agent_names(file: str) -> set[str] | None:
    """Return the agent names in a data file; empty without that column, None when the file is not looked into."""
    path = Path(file).expanduser()
    if "://" in file or path.is_dir() or path.suffix in (".json", ".jsonl"):
        return None
    if path.suffix != ".parquet" or not path.is_file():
        return set()
    if "agent_name" not in pyarrow.parquet.read_schema(path).names:
        return set()
    return set(pyarrow.parquet.read_table(path, columns=["agent_name"])["agent_name"].to_pylist())
