"""All that the start-up check sets in verl's configuration; for settings of verl that ours need see `needs.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.config import PATH
from verl_multiturn.records.write.run_file import new_start
from verl_multiturn.verl_bridge.names import (
    ENGINE_CHOICE,
    ENGINE_VENDOR,
    MANAGER,
    OUR_LOOPS,
    OUR_TRAINER,
    ROLLOUT,
    SGLANG,
    STRICT_ENGINE_VENDOR,
)
from verl_multiturn.verl_bridge.settings import OWN_SERVER, own_server, runs_our_server
from verl_multiturn.verl_bridge.startup.needs import set_needs
from verl_multiturn.verl_bridge.startup.view import RunView

OLD_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
"""verl's old key of the interactions' YAML: verl 0.9.1 does not know it and would raise a TypeError."""

IMAGES = "actor_rollout_ref.rollout.engine_kwargs.sglang.mm_process_config"
"""How SGLang resizes images."""

ROUTER = Path(__file__).parents[1] / "servers" / "router.yaml"
"""The YAML of our load balancer."""


def copy_settings(config: DictConfig) -> None:
    """Copy our settings to their place where an interpolation (`custom: ${mine}`) brings them from another.

    A setting that is written beside them later would take the place of the interpolation, and of all that it brings.
    """
    section = config.actor_rollout_ref.rollout
    with open_dict(config):
        for key in ("custom", "multiturn"):
            if section.get(key) is None:
                return
            if OmegaConf.is_interpolation(section, key):
                section[key] = section[key].copy()
            section = section[key]


def move_old_key(config: DictConfig) -> None:
    """Move verl's old key of the interactions' YAML to ours."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if "interaction_config_path" in multi_turn:
        with open_dict(config):
            path = multi_turn.pop("interaction_config_path")
            if path is not None:
                OmegaConf.update(config, f"{PATH}.interaction_config_path", path, force_add=True)


def unify_name(config: DictConfig) -> None:
    """Write our rollout's name as verl's `sglang`, with `derived.own_server` in our settings.

    So our servers have all that verl gives to that name alone: adapters, deltas of weights, videos. Reward models and
    teachers have verl's servers, whatever their configuration has taken over from the policy's.
    """
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        if runs_our_server(rollout):
            OmegaConf.update(config, OWN_SERVER, True, force_add=True)
        if rollout.name == ROLLOUT:
            rollout.name = SGLANG
        for parent, key in _other_rollouts(config):
            if parent[key].get("name") == ROLLOUT or own_server(parent[key]):
                parent[key] = _of_verl(parent[key])


def _other_rollouts(config: DictConfig) -> list[tuple[DictConfig, str]]:
    """Return the section and the key of each rollout configuration that is not the policy's."""
    models = [OmegaConf.select(config, key) for key in ("reward.reward_model", "reward_model")]
    teachers = dict(OmegaConf.select(config, "distillation.teacher_models") or {})
    found = [(model, "rollout") for model in models] + [(teacher, "inference") for teacher in teachers.values()]
    return [(section, key) for section, key in found if OmegaConf.is_dict(section) and section.get(key)]


def _of_verl(section: DictConfig) -> DictConfig:
    """Return a copy of a rollout configuration that asks for verl's server."""
    copied = section.copy()
    copied.name = SGLANG if section.get("name") == ROLLOUT else section.get("name")
    if own_server(section):
        custom: Any = OmegaConf.to_container(section.custom, resolve=True)
        del custom["multiturn"]["derived"]
        copied.custom = custom
    return copied


def make_absolute(config: DictConfig, keys: Iterable[str]) -> None:
    """Make the paths of models absolute: verl takes neither `~` nor a slash at the end.

    Args:
        config: verl's whole configuration.
        keys: Settings that name a model; a name that is not a folder here stays.
    """
    for key in keys:
        path = Path(OmegaConf.select(config, key)).expanduser()
        if path.is_dir():
            OmegaConf.update(config, key, os.path.abspath(path))


def complete(run: RunView) -> None:
    """Set in place the values that a run with an agent loop of ours needs; nothing in another run.

    Args:
        run: A view of the configuration, which all checks have accepted.
    """
    choose_engine(run)
    if not run.has_our_loop:
        return
    with open_dict(run.config):
        if run.is_text_mode or run.has_agents:
            run.rollout.skip_tokenizer_init = False  # SGLang needs a tokenizer to stop at a text
        resize_images(run)
        _resolve_paths(run)
        if run.settings.record_dir and not run.settings.derived.record_start:
            OmegaConf.update(run.config, f"{PATH}.derived.record_start", new_start(), force_add=True)
        set_needs(run)
        if needs_router(run):
            run.rollout.router_config_path = str(ROUTER)
        if (mode := run.our_trainer) is not None:
            # Our trainer of that mode verifies its batches and reports on the rollout.
            run.config.trainer.v1.trainer_mode = OUR_TRAINER + mode
            if not run.rollout.agent.get("agent_loop_manager_class"):
                run.rollout.agent.agent_loop_manager_class = MANAGER


def choose_engine(run: RunView) -> None:
    """Let training workers take our engine: verl chooses one by a variable of their environment."""
    mode = run.settings.prefix_tree
    wanted = mode == "on" or (mode == "auto" and run.has_our_loop)
    if not wanted or run.engine_vendor or not run.is_fsdp:
        return
    vendor = STRICT_ENGINE_VENDOR if mode == "on" else ENGINE_VENDOR
    with open_dict(run.config):
        OmegaConf.update(run.config, ENGINE_CHOICE, vendor, force_add=True)


def needs_router(run: RunView) -> bool:
    """Return whether siblings are to go to one server, and no other rule routes requests."""
    rollout = run.rollout
    taken = rollout.get("router_config_path") or rollout.get("full_determinism")
    return bool(run.runs_our_server and run.settings.cache.lead_ms and not taken)


def resize_images(run: RunView) -> None:
    """Let the engine resize images as the trainer does."""
    if run.engine_images:
        OmegaConf.update(run.config, IMAGES, run.engine_images, force_add=True)


def _resolve_paths(run: RunView) -> None:
    """Make paths absolute: workers may have another working directory than the driver."""
    from verl.utils.import_utils import resolve_config_path

    file, colon, name = run.estimator.rpartition(":")
    if run.has_own_estimator and file.endswith(".py"):
        run.config.algorithm.adv_estimator = f"{Path(file).expanduser().resolve()}{colon}{name}"
    path, function_path = run.tool_files
    if function_path:
        run.multi_turn.function_tool_path = str(Path(resolve_config_path(function_path)).resolve())
    if path and run.loops <= OUR_LOOPS:  # other loops take their tools from verl's setting
        run.multi_turn.tool_config_path = None
    ours = {name: getattr(run.settings, name) for name in ("interaction_config_path", "record_dir")}
    for name, given in {**ours, "derived.tool_config_path": path}.items():
        if given:
            OmegaConf.update(run.config, f"{PATH}.{name}", str(Path(given).resolve()), force_add=True)
