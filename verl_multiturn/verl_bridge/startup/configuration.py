"""The start-up check: a wrong setting ends the run before Ray, a model or an engine starts.

It is a Hydra callback, selected through Hydra's config store; verl itself is not changed. So it runs inside
`python -m verl.trainer.main_ppo`, and inside every other Hydra program with verl's configuration. A program that
builds the configuration in another way has to call `check_run` or `prepare_config` itself, as `eval` does.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import MultiTurnError
from verl_multiturn.runs.compose import expand_homes
from verl_multiturn.runs.ray_start import require_places
from verl_multiturn.runs.run_folder import OwnFiles
from verl_multiturn.verl_bridge.startup.own_code import check_own_code, has_other_environment
from verl_multiturn.verl_bridge.startup.ray_cpus import required_ray_cpus
from verl_multiturn.verl_bridge.startup.refusals import (
    BEFORE_PLATFORM,
    FILES,
    LAST,
    SETTINGS,
    VALUES,
    VERLS,
    WITHOUT_ROWS,
)
from verl_multiturn.verl_bridge.startup.refusals.files import models_of
from verl_multiturn.verl_bridge.startup.setting_changes import (
    complete,
    copy_settings,
    make_absolute,
    move_old_key,
    unify_name,
)
from verl_multiturn.verl_bridge.startup.table import check
from verl_multiturn.verl_bridge.startup.versions import check_versions
from verl_multiturn.verl_bridge.startup.view import RunView

ConfigHook = Callable[[DictConfig, int], None]
config_hooks: list[ConfigHook] = []
"""Functions that fill in a platform's settings.

Each is called with the configuration and the number of logical CPUs that Ray must have.
"""


def prepare_config(config: DictConfig) -> None:
    """Check a whole trainer configuration, and complete it in place.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: The run cannot work; the message names the setting, its value and the remedy.
    """
    import verl  # noqa: F401  # which loads the plugin, and with it a platform's hook

    check(RunView(config), BEFORE_PLATFORM)
    copy_settings(config)
    move_old_key(config)
    unify_name(config)
    for hook in config_hooks:
        hook(config, sum(required_ray_cpus(config).values()))
    run = RunView(config)
    check(run, SETTINGS)
    complete(run)


def check_run(config: DictConfig, is_training: bool = True, has_rows: bool = True) -> None:
    """Check everything that a run needs on the machine of its start, and complete its configuration in place.

    `StartUpCheck` calls it for a training and `eval` for an evaluation. In this order: the versions of verl and SGLang,
    values, files and folders, `prepare_config`, and the user's own code, since an import may take long.

    Args:
        config: verl's whole configuration.
        is_training: False for an evaluation: it starts no Ray, fills no batches, reports to no logger, and imports the
            user's code in this process before its first conversation.
        has_rows: Whether the run reads files of rows, as a gateway does not.

    Raises:
        ConfigError: The run cannot work; the message names the setting, its value and the remedy.
    """
    check_versions()
    if is_training:
        require_places(OmegaConf.select(config, "ray_kwargs.ray_init") or {}, os.environ)
    run = RunView(config)
    check(run, VALUES + (FILES if has_rows else WITHOUT_ROWS))
    make_absolute(config, models_of(run))
    is_imported = is_training and not has_other_environment(config)
    prepare_config(config)
    expand_homes(config)  # the comparison with verl's defaults is over
    run = RunView(config)
    if is_training:
        check(run, VERLS + LAST)
    check_own_code(run, is_imported=is_imported)


class StartUpCheck(Callback):
    """Hydra callback that runs `check_run` before the trainer's main function."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration of verl's trainer; exit with status 2 when it cannot work."""
        if not _is_trainer_config(config):
            return
        try:
            check_run(config)
        except MultiTurnError as error:
            # Hydra turns a callback's Exception into a warning and goes on. SystemExit is not an Exception.
            print(f"\nverl-multiturn: {error}\n", file=sys.stderr)
            raise SystemExit(2) from None
        except Exception:  # a bug in the check must not pass for a checked configuration
            traceback.print_exc()
            raise SystemExit(1) from None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse `--multirun` of verl's trainer with exit status 2."""
        # Hydra composes the configuration of each job after its callbacks have run, so they cannot check it.
        if _is_trainer_config(config):
            print(
                "\nverl-multiturn: Hydra's --multirun skips the start-up check; start the runs one by one\n",
                file=sys.stderr,
            )
            raise SystemExit(2)


def _is_trainer_config(config: DictConfig) -> bool:
    """Return whether this is verl's trainer, and not another Hydra program in the same environment."""
    return all(OmegaConf.select(config, key) is not None for key in ("actor_rollout_ref.rollout.multi_turn", "trainer"))


def check_early(config: DictConfig, *, is_on_cpu: bool, is_here: bool = True, own_files: OwnFiles = "there") -> None:
    """Refuse settings that can be refused without importing verl, torch or Ray; the start checks the whole table again.

    Args:
        config: verl's whole configuration; it stays as it is. One of another trainer is not looked at.
        is_on_cpu: Whether the run will be on the CPU platform.
        is_here: Whether it will be on this machine; otherwise files, rows and accounts are not looked for.
        own_files: Whether the run has made the files of its own folder (`RunView.own_files`).

    Raises:
        ConfigError: The run cannot work; the message names the setting, its value and the remedy.
    """
    if not _is_trainer_config(config):
        return
    config = copy.deepcopy(config)
    run = RunView(config, True, own_files)
    check(run, VALUES + (FILES if is_here else []))
    check(run, BEFORE_PLATFORM)
    copy_settings(config)
    move_old_key(config)
    unify_name(config)
    if is_on_cpu and config.trainer.n_gpus_per_node * config.trainer.nnodes == 1:
        # As the platform does. A run of several devices is one for GPUs, and its sizes hold as they are written.
        OmegaConf.update(config, "actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    run = RunView(config, True, own_files)
    check(run, SETTINGS)
    if is_here:
        check(run, LAST)
        check_own_code(run, is_imported=False)


def register_callback() -> None:
    """Make `StartUpCheck` the default of Hydra's `hydra/callbacks` group in this process."""
    store = ConfigStore.instance()
    name = "verl_multiturn"
    store.store(group="hydra/callbacks", name=name, node={name: {"_target_": f"{__name__}.{StartUpCheck.__name__}"}})
    hydra = store.load("hydra/config.yaml").node
    for entry in hydra.defaults:
        if "callbacks" in entry and entry.callbacks is None:
            entry.callbacks = name
    store.store(group="hydra", name="config", node=hydra, provider="hydra")
