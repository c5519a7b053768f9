"""The first import of verifiers in a process of the bridge, and what it needs around it. Runs in verifiers' Python.

Imports the standard library only; `import_verifiers` imports the rest, so that the report on a Python without verifiers
can say so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError

LOCAL = ("subprocess", "docker", "podman", "apptainer")
"""Runtimes that need no account."""


def import_verifiers(folder: str, paths: Sequence[str]) -> Any:
    """Import verifiers, and return its module `verifiers.v1`.

    Args:
        folder: The folder for all that this process and its children leave in a home or among temporary files.
        paths: Folders with task sets.
    """
    paths = [str(Path(each).resolve()) for each in paths]
    sys.path[:0] = paths
    # A tool set's process is started with the module's name alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH", ""))))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    home = os.environ.get("HOME")
    os.environ["HOME"] = folder  # verifiers takes the place of its runtimes' folders from it, at import
    try:
        import verifiers.v1 as found
        from verifiers.v1.runtimes import subprocess as _  # noqa: F401  # its folder
    finally:
        if home is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = home
    os.environ.pop("PRIME_API_KEY", None)  # no session has an account
    return found


def config_of(name: str, given: Mapping[str, Any], where: str, with_roles: bool) -> Any:
    """Return an environment's configuration, as verifiers reads it.

    Args:
        name: The environment's name in the settings.
        given: Its configuration there.
        where: The setting's name, for errors.
        with_roles: Whether each seat names itself as the model.

    Raises:
        ConfigError: verifiers does not accept it, its task set cannot be imported, or a seat cannot be played here.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    at = f"{where}.envs.{name}"
    given = _with_names(given)
    try:
        config = resolve_env_config(given)
        env_config_type(config.taskset.id, config.id)
    except ConfigError:
        raise
    except Exception as error:  # an import may raise anything, and so may a validation
        raise ConfigError(f"{at}: verifiers does not accept it: {type(error).__name__}: {error}; correct it") from None
    if config.retries.max_retries or config.retries.rules:
        raise ConfigError(f"{at}.retries: an episode is one session, and is not repeated; leave it out")
    for seat, spec in agent_config_fields(config).items():
        if spec.runtime.type not in LOCAL:
            raise ConfigError(
                f"{at}.{seat}.runtime.type: {spec.runtime.type!r} needs an account at a cloud, expected one of "
                f"{', '.join(LOCAL)}; set {seat}: {{runtime: {{type: subprocess}}}}"
            )
        if spec.retries.max_retries or spec.retries.rules:
            raise ConfigError(f"{at}.{seat}.retries: a session is not repeated; leave it out")
        if spec.model is not None or spec.client is not None:
            raise ConfigError(
                f"{at}.{seat}: 'model' and 'client' would lead it past the endpoint; leave them out, and list the seat "
                "in proxy.roles if it is not to be trained"
            )
        if with_roles:
            spec.model = seat
    return config


def _with_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which a harness whose name YAML has read as "nothing" is called `null` again."""
    made = dict(given)
    for seat, spec in made.items():
        harness = spec.get("harness") if isinstance(spec, Mapping) else None
        if isinstance(harness, Mapping) and harness.get("id", "") is None:
            made[seat] = {**spec, "harness": {**harness, "id": "null"}}
    return made
