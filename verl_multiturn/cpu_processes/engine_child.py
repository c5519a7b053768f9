"""The extra work of a fork of the server that SGLang's engine spawns."""

from __future__ import annotations

import os
import sys

import psutil


def take_for_parent(spawner: int) -> None:
    """Let psutil call a process this one's parent: SGLang's processes send it a signal when they fail.

    Args:
        spawner: Id of the process that spawned this one.
    """
    parent = psutil.Process.parent

    def parent_of(process: psutil.Process) -> psutil.Process | None:
        return psutil.Process(spawner) if process.pid == os.getpid() else parent(process)

    psutil.Process.parent = parent_of  # type: ignore[method-assign,assignment]


def register_models(package: str | None) -> None:
    """Give SGLang's registry of models a package, as the registry's import does with that of the environment.

    The server has imported the registry with SGLang's models, and without a package.

    Args:
        package: Name of the package; None: none is set.
    """
    registry = sys.modules.get("sglang.srt.models.registry")
    if registry is not None and package:
        registry.ModelRegistry.register(package, overwrite=True)
