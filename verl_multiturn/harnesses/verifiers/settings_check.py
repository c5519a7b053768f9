"""The report of verifiers' Python, before a run, on the settings of the bridge: a program of `processes/zygote.py`.

Each environment is made, and its seats are asked whether they are trained. No task is loaded, nothing is started, and
nothing is forked from this process. The standard library alone is imported at first, so that a Python without verifiers
can report that.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.installed import check_version
from verl_multiturn.harnesses.verifiers.imports import LOCAL, config_of, import_verifiers

VERSION = "0.4.0"
"""The version of verifiers that the bridge was written for."""


def load(spec: Mapping[str, Any]) -> None:
    """Check the settings.

    Args:
        spec: `settings`, those of the bridge; `where`, the setting's name; `install`, the remedy without verifiers;
            `roles` and `train`, the settings of these names.

    Raises:
        ConfigError: They cannot work.
    """
    where, settings = spec["where"], spec["settings"]
    check_version(spec, "verifiers", VERSION, (3, 11))
    folder = tempfile.mkdtemp(prefix="verl-multiturn-verifiers-check-")
    try:
        import_verifiers(folder, settings["paths"])
        for name, given in settings["envs"].items():
            _check_environment(name, given, where, spec)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(served: socket.socket, loaded: None) -> NoReturn:
    """Never called: the process is there for its checks alone."""
    raise AssertionError


def _check_environment(name: str, given: Mapping[str, Any], where: str, spec: Mapping[str, Any]) -> None:
    from verifiers.v1.utils.loaders import load_environment

    at = f"{where}.envs.{name}"
    roles = spec["roles"]
    config = config_of(name, given, where, with_roles=bool(roles))
    try:
        env = load_environment(config)
        seats = asyncio.run(trainable_seats(env))
        toolsets = [*type(env.taskset).task_type().toolsets(config.taskset.task), *env.taskset.toolsets(config.taskset)]
        if config.taskset.id == "textarena":
            from verl_multiturn.harnesses.verifiers.remains import check_words

            check_words()
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None
    except Exception as error:  # an author's code may raise anything
        raise ConfigError(f"{at}: it cannot be made: {type(error).__name__}: {error}; correct it") from None
    for toolset in toolsets:
        kind = toolset.config.runtime.type
        if not toolset.config.url and kind not in LOCAL:
            raise ConfigError(
                f"{at}: the tool set {toolset.server_name!r} runs in {kind!r}, which needs an account, expected one of "
                f"{', '.join(LOCAL)}; set its 'runtime'"
            )
    _check_roles(at, seats, roles, spec["train"])


async def trainable_seats(env: Any) -> dict[str, bool]:
    """Return the names of an environment's seats, and which of them its `setup` leaves to be trained."""
    found = {name: SimpleNamespace(trainable=True) for name in env._agent_specs}
    await env.setup(SimpleNamespace(**found))
    return {name: seat.trainable for name, seat in found.items()}


def _check_roles(at: str, seats: Mapping[str, bool], roles: list[str] | None, train: list[str] | None) -> None:
    untrained = [seat for seat, trainable in seats.items() if not trainable]
    learners = [seat for seat, trainable in seats.items() if trainable]
    if not learners:
        raise ConfigError(f"{at}: none of its seats {list(seats)} is trainable; there is nothing to learn from")
    if not roles:
        if untrained:
            raise ConfigError(
                f"{at}: the seat {untrained[0]!r} is not to be trained, and without roles it would be; set "
                f"proxy.roles={list(seats)} and proxy.train={learners}"
            )
        if len(seats) > 1:
            raise ConfigError(
                f"{at}: it has the seats {list(seats)}, which would share one reward; set proxy.roles={list(seats)}"
            )
        return
    if missing := [seat for seat in seats if seat not in roles]:
        raise ConfigError(f"{at}: its seat {missing[0]!r} is none of proxy.roles={roles}; add it")
    if wrong := [seat for seat in untrained if seat in (roles if train is None else train)]:
        raise ConfigError(
            f"{at}: its seat {wrong[0]!r} is not to be trained, and proxy.train has it; leave it out of proxy.train"
        )
