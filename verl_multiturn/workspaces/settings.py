"""Settings of a workspace."""

from __future__ import annotations

import math
import os

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.sandbox.settings import FolderName, PackageName, SandboxSettings

ANSWER_GRACE_S = 30.0
"""Seconds that a workspace has to answer beyond the time of its command, on a busy machine; later it is ended."""
_DRIVER_MODULES = ("base64", "ctypes", "io", "json", "select", "signal", "subprocess", "tarfile")
"""Imports of `driver.py`, loaded once for all workspaces."""


class WorkspaceSettings(BaseModel):
    """Settings of a workspace, each with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Wall-clock seconds of a command that names no other number. A command that takes longer ends, and with it every
    other process of the workspace; the files stay."""

    longest_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Largest number of seconds that a command may name."""

    memory_mb: int = Field(default=1024, ge=16)
    """Memory of one workspace, without its files. One process gets an error; several together are killed."""

    disk_mb: int = Field(default=256, ge=1)
    """Size of all files of a workspace, which lie in memory."""

    processes: int = Field(default=64, ge=4)
    """Largest number of processes and threads at the same time, the shell and the one that starts it included."""

    output_characters: int = Field(default=10_000, ge=100)
    """Characters of one command's output that are kept: one half from its beginning, the other half from its end."""

    packages: bool | tuple[PackageName, ...] = False
    """Installed packages that commands may import, and whose programs they may start. `true`: all of them. Names, as
    `pip list` shows them: these packages and their requirements."""

    folders: tuple[FolderName, ...] = ()
    """Names of folders at the root that commands may write to: `app` for `/app`. The opener of a workspace makes them,
    in `/tmp`."""

    pool: int = Field(default=2, ge=0)
    """Number of workspaces kept ready. More are started when more are needed."""

    def of_sandbox(self) -> SandboxSettings:
        """Return the settings of the sandbox in which a workspace lies.

        Its limits of time are the backstop behind the workspace's own: no command reaches them within its time-out.
        """
        longest_s = max(self.timeout_s, self.longest_timeout_s)
        return SandboxSettings(
            timeout_s=longest_s + 2 * ANSWER_GRACE_S,
            cpu_s=math.ceil(longest_s + ANSWER_GRACE_S) * min(os.cpu_count() or 1, self.processes),
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            processes=self.processes,
            output_characters=self.output_characters,
            packages=self.packages,
            preimport=_DRIVER_MODULES,
            folders=self.folders,
            pool=self.pool,
        )
