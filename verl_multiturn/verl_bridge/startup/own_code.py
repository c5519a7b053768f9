"""The part of the start-up check about a user's own code, which verl's workers import only minutes later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.imports import ADVANTAGES, PACKAGE, POLICY_LOSS, REWARD, ROUTE, Code, import_problem
from verl_multiturn.verl_bridge.names import MANAGER, REWARD_MANAGERS, TURN_LOSS
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.startup import verl_names
from verl_multiturn.verl_bridge.startup.view import LaterError, RunView

_ROLLOUT = "actor_rollout_ref.rollout"
_ENVIRONMENT = "ray_kwargs.ray_init.runtime_env"
LIBRARY = "actor_rollout_ref.model.external_lib"
"""The setting of the module that verl imports in the actor's processes, where it may register a policy loss."""
# Settings that name a class or a module by its dotted name, and the kind of object.
_DOTTED = {
    f"{_ROLLOUT}.agent.agent_loop_manager_class": "class",
    f"{_ROLLOUT}.checkpoint_manager_class": "class",
    "trainer.checkpoint_callback_class": "class",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": "module",
    LIBRARY: "module",
}
_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_REGISTER, _IMPORT = "register", "importlib"


def has_other_environment(config: DictConfig) -> bool:
    """Return whether Ray makes the workers an environment of their own: `runtime_env` names more than variables.

    Ask before the start-up check changes the configuration: on the CPU it names an interpreter of ours there.
    """
    environment = OmegaConf.select(config, _ENVIRONMENT) or {}
    return any(value is not None for name, value in environment.items() if name != "env_vars")


def check_own_code(run: RunView, *, is_imported: bool = True) -> None:
    """Refuse a file, class, module or reward function of the user's own that cannot be imported, or not be called.

    Args:
        run: The run, after the check of its settings.
        is_imported: False where the workers have another environment: nothing is imported here then.

    Raises:
        ConfigError: One cannot be imported, or lacks the name that the configuration gives.
    """
    given = run.value(f"{_ENVIRONMENT}.env_vars") or {}
    variables = {name: str(value) for name, value in given.items()}
    codes: list[Code] = []
    for part in (_reward, _estimator, _managers, _files, _dotted, _policy_loss, _agent_loops):
        with contextlib.suppress(LaterError):  # raised by an early view alone
            codes += part(run)
    if is_imported and (problem := import_problem(codes, variables)):
        raise ConfigError(problem)


def _section(run: RunView, current: str, older: str) -> str:
    """Return the older of two places of a section where any value is set there; verl then takes it instead."""
    values = run.value(older) or {}
    return older if any(value is not None for value in values.values()) else current


def _reward(run: RunView) -> Iterator[Code]:
    section = _section(run, "reward.custom_reward_function", "custom_reward_function")
    if not run.value(f"{section}.path"):
        return
    options = f"{section}.reward_kwargs"
    code, given = _file(run, f"{section}.path", f"{section}.name", "function"), run.value(options)
    keywords = tuple(map(str, given)) if OmegaConf.is_dict(given) else ()
    yield replace(code, kind=REWARD if _calls_by_keyword(run) else code.kind, options=options, keywords=keywords)
    if is_our_reward(run.config, section):
        yield from _routes(run, options)


def _routes(run: RunView, options: str) -> Iterator[Code]:
    """Yield the functions that routes of our `compute_score` name; those in the box are not imported."""
    from verl_multiturn.rewards.router import REWARDS  # takes a while to import

    routes = run.value(f"{options}.routes") or {}
    for pattern, name in routes.items():
        if name not in REWARDS:
            yield Code(f"{options}.routes[{str(pattern)!r}]", str(name), kind=ROUTE)


def _calls_by_keyword(run: RunView) -> bool:
    """Return whether the reward manager is one of verl's, which all call the reward function in one way."""
    keys = _manager_keys(run)
    return run.value(keys["source"]) == _REGISTER and run.value(keys["name"]) in REWARD_MANAGERS


def _estimator(run: RunView) -> Iterator[Code]:
    if run.has_own_estimator:
        where = f"algorithm.adv_estimator={run.estimator!r}"
        yield Code(where, run.estimator, kind=ADVANTAGES, keywords=run.settings.advantage.options)


def _manager_keys(run: RunView) -> dict[str, str]:
    """Return the settings of the reward manager: verl's older ones, where these are set."""
    keys = {name: f"reward.reward_manager.{name}" for name in ("name", "source")} | {
        "path": "reward.reward_manager.module.path"
    }
    older = {
        "name": "reward_model.reward_manager",
        "source": "reward_model.reward_loop_source",
        "path": "reward_model.reward_loop_module_path",
    }
    if run.value(older["name"]) is not None:
        keys["name"] = older["name"]
    if run.value(older["source"]) is not None:
        keys |= {"source": older["source"], "path": older["path"]}
    return keys


def _managers(run: RunView) -> Iterator[Code]:
    """Check the name of the reward manager, or yield its class in a file of the user's own."""
    keys = _manager_keys(run)
    source, name = (run.value(keys[each]) for each in ("source", "name"))
    if source == _IMPORT:
        yield _file(run, keys["path"], keys["name"], "class")
    elif source != _REGISTER:
        raise ConfigError(f"{keys['source']}={source!r}: expected {_REGISTER} or {_IMPORT}")
    else:
        _check_registered(run, keys["name"], name)


def _check_registered(run: RunView, key: str, name: Any) -> None:
    run.require_stack()
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    known = sorted(REWARD_MANAGER)
    if name in known:
        return
    hint = did_you_mean(str(name), known)
    # A file with a reward function may register a manager of its own.
    if hint or not any(_reward(run)):
        raise ConfigError(f"{key}={name!r}: {hint or f'known are {known}'}")


def _files(run: RunView) -> Iterator[Code]:
    if run.value("data.custom_cls.path") is not None:
        yield _file(run, "data.custom_cls.path", "data.custom_cls.name", "class")
    sampler = "trainer.v1.sampler.custom_sampler"
    if any((run.value(sampler) or {}).values()):  # verl uses it only if both are set
        yield _file(run, f"{sampler}.path", f"{sampler}.name", "class")


def _file(run: RunView, path_key: str, name_key: str, kind: str) -> Code:
    place, name = run.value(path_key), run.value(name_key)
    where, called = f"{path_key}={place!r}", f"{name_key}={name!r}"
    if not isinstance(place, str) or not place:
        raise ConfigError(f"{where}: expected a Python file, or {PACKAGE} and a module, since {called}; name one")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{called}: expected the name of a {kind} in {place!r}; set it")
    if not place.startswith(PACKAGE) and not Path(place.removeprefix("file://")).is_file():
        raise ConfigError(f"{where}: there is no such file; correct the path")
    return Code(where, place, called, name, kind)


def _dotted(run: RunView) -> Iterator[Code]:
    for key, kind in _DOTTED.items():
        given = run.value(key)
        for name in given if OmegaConf.is_list(given) else [given]:
            if name not in (None, "", MANAGER):
                yield _dotted_code(f"{key}={name!r}", name, kind)


def _policy_loss(run: RunView) -> Iterator[Code]:
    """Yield a policy loss that is none of verl's, where a module of the user's may register it."""
    given, name = run.value(LIBRARY), run.value(_LOSS)
    libraries = list(given) if OmegaConf.is_list(given) else [given]
    if given and name is not None and name not in {*verl_names.policy_losses(), TURN_LOSS}:
        place = PACKAGE + str(libraries[-1])  # the others are imported by then
        yield Code(f"{LIBRARY}={given!r}", place, f"{_LOSS}={name!r}", str(name), POLICY_LOSS)


def _dotted_code(where: str, name: Any, kind: str) -> Code:
    module, dot, last = str(name).rpartition(".")
    if kind == "module":
        return Code(where, f"{PACKAGE}{name}")
    if not dot:
        raise ConfigError(f"{where}: expected a dotted name; write it as 'package.module.name'")
    return Code(where, PACKAGE + module, where, last, kind)


def _agent_loops(run: RunView) -> Iterator[Code]:
    """Check the YAML files of agent loops and of a router, and yield the classes of the agent loops."""
    _yaml(run, f"{_ROLLOUT}.router_config_path")
    key = f"{_ROLLOUT}.agent.agent_loop_config_path"
    entries = _yaml(run, key)
    if entries is None:
        return
    path = run.value(key)
    listed: list[Any] = list(entries) if OmegaConf.is_list(entries) else [None]
    for entry in listed:
        if not OmegaConf.is_dict(entry) or not entry.get("name") or not entry.get("_target_"):
            raise ConfigError(f"{key}={path!r}: expected a list of mappings with name and _target_; mend the file")
        target = entry.get("_target_")
        yield _dotted_code(f"{key}={path!r}: _target_={target!r}", target, "")


def _yaml(run: RunView, key: str) -> Any:
    """Return the content of a YAML file; None where the setting names none."""
    path = run.value(key)
    if not path:
        return None
    run.require_stack()
    from verl.utils.import_utils import resolve_config_path

    try:
        found = Path(resolve_config_path(path))  # verl looks in its own folder, too
    except FileNotFoundError:
        found = Path(path)
    if not found.is_file():
        raise ConfigError(f"{key}={path!r}: there is no such file; correct the path")
    try:
        return OmegaConf.load(found)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}={path!r} is no valid YAML: {error}") from None
