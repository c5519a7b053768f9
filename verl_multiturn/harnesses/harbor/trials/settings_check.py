"""The report of Harbor's Python, before a run, on the settings of the bridge: a program of `processes/zygote.py`.

Nothing is forked from it. The standard library alone is imported at first, so that a Python without Harbor can report
that.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.installed import check_version

VERSION = "0.25.0"
"""The version of Harbor that the bridge was written for."""


def load(spec: Mapping[str, Any]) -> None:
    """Check the settings.

    Args:
        spec: `settings`, those of the bridge; `where`, the setting's name; `install`, the remedy without Harbor.

    Raises:
        ConfigError: They cannot work.
    """
    where, settings = spec["where"], spec["settings"]
    check_version(spec, "harbor", VERSION, (3, 12))
    harness = _harness(settings["harness"], where)
    _environment(settings, where)
    if settings["environment"] == "workspace":
        _check_workspace(settings["harness"], harness, where)


def serve(served: socket.socket, loaded: None) -> NoReturn:
    """Never called: the process is there for its checks alone."""
    raise AssertionError


def _harness(name: str, where: str) -> Any:
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    try:
        given = {"import_path": name} if ":" in name else {"name": name}
        return AgentFactory.get_agent_class_from_config(AgentConfig.model_validate(given))
    except Exception as error:  # Harbor raises ValueError, ImportError and others
        known = ", ".join(AgentFactory.registered_names())
        raise ConfigError(
            f"{where}.harness: {name!r} is no harness that Harbor {VERSION} knows ({error}); expected 'module:Class' "
            f"or one of {known}"
        ) from None


def _environment(settings: Mapping[str, Any], where: str) -> None:
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    from verl_multiturn.harnesses.harbor.trials.end_cause import WORKSPACE

    name = settings["environment"]
    known = [each.value for each in EnvironmentType]
    if name not in known and name != "workspace" and ":" not in name:
        raise ConfigError(
            f"{where}.environment: {name!r} is no environment that Harbor {VERSION} knows; expected 'workspace', "
            f"'module:Class' or one of {', '.join(known)}"
        )
    try:
        if name in known:
            EnvironmentFactory.run_preflight(EnvironmentType(name))
        else:
            EnvironmentFactory.run_preflight(None, WORKSPACE if name == "workspace" else name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a preflight ends its process where something is missing
        raise ConfigError(f"{where}.environment: {name!r} does not work here: {error}; mend that") from None


def _check_workspace(name: str, harness: Any, where: str) -> None:
    """Refuse harnesses that need more than commands."""
    from harbor.agents.installed.base import BaseInstalledAgent
    from harbor.agents.terminus_2.terminus_2 import Terminus2

    why = ""
    if issubclass(harness, BaseInstalledAgent):
        why = "installs itself in the environment, and a workspace has no network"
    elif issubclass(harness, Terminus2):
        why = "works in a terminal, and a workspace has none"
    if why:
        raise ConfigError(
            f"{where}.harness: {name!r} {why}; name a container engine as the environment, or the harness "
            "'verl_multiturn.harnesses.harbor.mini_swe:MiniSweAgent'"
        )
