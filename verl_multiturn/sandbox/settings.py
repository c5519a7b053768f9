"""Settings of a sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

PackageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$")]
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
_TAKEN = ("bin", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "sbin", "tmp", "usr")


def _not_taken(name: str) -> str:
    if name in _TAKEN:
        raise ValueError(f"/{name} is a folder of the sandbox itself")
    return name


FolderName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$"), AfterValidator(_not_taken)]
"""Name of a folder at the root that the sandbox itself does not have."""


class SandboxSettings(BaseModel):
    """Settings of a sandbox, each with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    isolation: Literal["bwrap", "subprocess"] = "bwrap"
    """Kind of isolation.

    `bwrap`: the code has its own namespaces, no network, and sees nothing of the host but Python and system libraries.
    `subprocess`: a plain process with limits, a cleared environment and a temporary folder. It can read and do all that
    you can, and its limits do not count other processes that the code starts. Use it only for code that you trust.
    """

    timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Wall-clock seconds of one call. A call that takes longer ends the sandbox: all its processes are killed."""

    cpu_s: int = Field(10, gt=0)
    """CPU seconds of one call, all its processes together. A call that takes more ends the sandbox."""

    memory_mb: int = Field(512, ge=16)
    """Memory of one sandbox, without its files. One process gets a MemoryError; several together end the sandbox."""

    disk_mb: int = Field(64, ge=1)
    """Size of the folder that the code may write to, which lies in memory. `subprocess` limits each file alone."""

    processes: int = Field(32, ge=1)
    """Largest number of processes and threads at the same time, the interpreter itself included."""

    output_characters: int = Field(10_000, ge=100)
    """Characters of one call's output that are kept: one half from its beginning, the other half from its end."""

    packages: bool | tuple[PackageName, ...] = False
    """Installed packages that the code may import and whose programs it may start. `true`: all of them. Names, as
    `pip list` shows them: these packages and their requirements, which needs `bwrap`."""

    preimport: tuple[ModuleName, ...] = ()
    """Modules that are loaded once, before the first call, so that a call imports them at no cost.

    Modules of installed packages need `packages`.
    """

    folders: tuple[FolderName, ...] = ()
    """Names of folders at the root that the code may write to, beside its own: `app` for `/app`. Needs `bwrap`.

    Each is a link to a folder of that name in `/tmp`, which the code has to make.
    """

    pool: int = Field(4, ge=0)
    """Number of sandboxes kept ready. More are started when more are needed."""
