"""Refusals about `trainer.logger`: verl opens its loggers when the models and engines are loaded."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup import verl_names
from verl_multiturn.verl_bridge.startup.own_code import has_other_environment
from verl_multiturn.verl_bridge.startup.table import Check
from verl_multiturn.verl_bridge.startup.view import RunView

_LOGGER = "trainer.logger"
_OLD_WANDB = "tracking"
_PACKAGES = {
    "wandb": "wandb", _OLD_WANDB: "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "swanlab": "swanlab",
    "trackio": "trackio", "clearml": "clearml", "vemlp_wandb": "volcengine_ml_platform", "rl_insight": "rl_insight",
}  # fmt: skip
"""By logger, the module that it needs."""
_VOLCENGINE = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")
_WITHOUT_NET = ("offline", "disabled", "dryrun", "local")


def check_logger_names(run: RunView) -> None:
    """Refuse a logger that verl does not know."""
    given = run.value(_LOGGER)
    known = sorted({*verl_names.loggers(), _OLD_WANDB})
    for name in _names(run):
        if name not in known:
            if isinstance(given, str) and given.strip().startswith(("[", "(")):
                raise ConfigError(f"{_LOGGER}={given!r}: expected a list, got text; write '{_LOGGER}=[console,wandb]'")
            hint = did_you_mean(str(name), known) or f"known are {known}"
            raise ConfigError(f"{_LOGGER}: verl has no logger {name!r}; {hint}")


def check_loggers(run: RunView) -> None:
    """Refuse a logger whose package is missing, or that has no login."""
    # In a cluster the logger may run on another machine, whose keys cannot be seen from here.
    is_elsewhere = has_other_environment(run.config) or run.cluster is not None
    for name in _names(run):
        if not has_other_environment(run.config) and name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
            package = _PACKAGES[name].replace("_", "-")
            raise ConfigError(
                f"{_LOGGER}: {name!r} needs the package {package}, which is not installed; pip install {package}, or "
                f"leave {name!r} out of the list"
            )
        if not is_elsewhere and (needed := _missing_key(name, _variables(run))):
            raise ConfigError(
                f"{_LOGGER}: {name!r} is not logged in on this machine; set {needed}, or leave {name!r} out of the list"
            )


def _names(run: RunView) -> list[Any]:
    given = run.value(_LOGGER)
    return [given] if isinstance(given, str) else list(given or [])


def _variables(run: RunView) -> dict[str, str]:
    """Return the variables of the workers' environment."""
    given = run.value("ray_kwargs.ray_init.runtime_env.env_vars") or {}
    return {**os.environ, **{str(name): str(value) for name, value in given.items()}}


def _missing_key(name: str, variables: Mapping[str, str]) -> str:
    """Return the key that a logger's account needs and lacks; empty if none is missing."""
    if name in ("wandb", _OLD_WANDB):
        host = urlsplit(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        there = (
            any(variables.get(key) for key in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
            or variables.get("WANDB_MODE", "").lower() in _WITHOUT_NET
            or _in_netrc(variables.get("NETRC") or "~/.netrc", host)
            or _in_netrc("~/_netrc", host)
        )
        return "" if there else "WANDB_API_KEY (or `wandb login`), or WANDB_MODE=offline"
    if name == "swanlab":
        there = (
            bool(variables.get("SWANLAB_API_KEY"))
            or variables.get("SWANLAB_MODE", "cloud").lower() in _WITHOUT_NET
            or (Path(variables.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser() / ".netrc").is_file()
        )
        return "" if there else "SWANLAB_API_KEY (or `swanlab login`), or SWANLAB_MODE=local"
    if name == "clearml":
        file = Path(variables.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
        keys = [variables.get(key) for key in ("CLEARML_API_ACCESS_KEY", "CLEARML_OFFLINE_MODE")]
        return "" if any(keys) or file.is_file() else "CLEARML_API_ACCESS_KEY (or run clearml-init)"
    if name == "vemlp_wandb":
        return ", ".join(key for key in _VOLCENGINE if not variables.get(key))
    return ""


def _in_netrc(path: str, host: str) -> bool:
    """Return whether a file of logins has one for a host; a file that cannot be read has none."""
    try:
        return netrc.netrc(str(Path(path).expanduser())).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return False


NAMES: list[Check] = [check_logger_names]
LOGGERS: list[Check] = [check_loggers]
