"""The configuration of verl's trainer, composed by Hydra without importing verl."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.launch.plan import RunPlan, searchpath

_VERLS = "pkg://verl.trainer.config"


def compose_launch(launch: RunPlan) -> Any:
    """Compose the configuration of a planned run, and return it as Hydra's `DictConfig`.

    Args:
        launch: The planned run, from `plan_launch`.

    Raises:
        ConfigError: verl or Hydra is not installed, or an override or a file does not fit the configuration.
    """
    folder = _folder_of_verl()
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise ConfigError(f"{error}: Hydra comes with verl; run this in the environment that trains") from None
    # For `pkg://verl…`, Hydra would import verl, which takes many seconds. So name the folder of verl's YAML files.
    searched = [f"file://{folder / 'trainer' / 'config'}" if entry == _VERLS else entry for entry in launch.searched]
    # Hydra's own settings (`hydra.…`) are not part of the composed configuration.
    words = [word for word in launch.settings() if not word.lstrip("+~").startswith("hydra.")]
    try:
        with initialize_config_dir(str(launch.folder), version_base=None):
            return compose("config", overrides=[searchpath(searched), *words])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{launch.name}: {error}") from None


def resolved(config: Any) -> dict[str, Any]:
    """Return a composed configuration as plain dictionaries and lists, with all references replaced by values.

    Args:
        config: The `DictConfig` from `compose_launch`.

    Raises:
        ConfigError: A value refers to another value that does not exist.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _folder_of_verl() -> Path:
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"verl is not installed for {sys.executable!r}; run this in the environment that trains, or name "
            "its Python with the variable PYTHON"
        )
    return Path(next(iter(found.submodule_search_locations)))
