"""A workspace of the embedded sandbox as an environment of Harbor. Runs in Harbor's Python; no container is needed.

A task's `/app`, `/logs`, `/tests` and `/solution` are folders of the workspace. Its programs are those of this machine,
and it has no network: tasks that need an image of their own are refused, and so are harnesses that install themselves.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.tar_transfer import pack_dir_to_bytes
from harbor.models.task.config import NetworkPolicy

from verl_multiturn.harnesses.harbor.trials.definition import read_definition
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import read_tar
from verl_multiturn.workspaces.workspace import Workspace, WorkspaceError, WorkspacePool

_FOLDERS = ("app", "logs", "solution", "tests")
"""Folders at the root that Harbor and its tasks write to."""
_LONGEST_S = 86_400.0
"""Seconds of a command for which Harbor names none, such as the tests; the task's own limits end it before."""
_DOWNLOAD_BYTES = 64 * 2**20


class WorkspaceEnvironment(BaseEnvironment):
    """A workspace, opened at `start` and closed at `stop`. Harbor makes it, from the import path of this class."""

    def __init__(self, *args: Any, workspace: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take Harbor's arguments.

        Args:
            args: Harbor's.
            workspace: Settings of the workspace (`WorkspaceSettings`), beside those that the task's own limits give.
            kwargs: Harbor's.
        """
        self._given = dict(workspace or {})
        self._pool: WorkspacePool | None = None
        self._workspace: Workspace | None = None
        self._longest_s = _LONGEST_S
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return the name of this kind of environment."""
        return "workspace"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return what it can do: it has no network, whatever the task allows."""
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Return which of the task's limits hold."""
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    @property
    def lost(self) -> str:
        """Return why the workspace ended before `stop`, in words; empty if it did not."""
        return (self._workspace.stopped or "") if self._workspace is not None else ""

    def _validate_definition(self) -> None:
        """Read the Dockerfile.

        Raises:
            ConfigError: The task needs an image.
        """
        given = self.task_env_config
        definition = read_definition(self.environment_dir, given.docker_image, workdir=given.workdir)
        self._workdir, self._variables, self._copies = definition.workdir, definition.variables, definition.copies

    async def start(self, force_build: bool) -> None:
        """Open the workspace, and bring the task's files into it."""
        wanted = {PurePosixPath(path).parts[1] for path in (self._workdir, *(target for _, target in self._copies))}
        limits = {
            "memory_mb": self._effective_memory_mb,
            "disk_mb": self._effective_storage_mb,
        }
        settings = {
            "longest_timeout_s": _LONGEST_S,
            "output_characters": 1_000_000,
            "pool": 0,
            "folders": tuple(sorted({*_FOLDERS, *wanted} - {"tmp"})),
            **{name: limit for name, limit in limits.items() if limit},
            **self._given,
        }
        made_of = WorkspaceSettings(**settings)
        self._longest_s = made_of.longest_timeout_s
        self._pool = WorkspacePool(made_of)
        self._workspace = await self._pool.open()
        made = [f"/tmp/{name}" for name in settings["folders"]]
        made += [self._workdir, *(str(PurePosixPath(target)) for target in self._mount_targets())]
        await self._sure(f"umask 022; for each in {shlex.join(made)}; do mkdir -p $each; done")
        for source, target in self._copies:
            path = self.environment_dir / source
            await (self.upload_file(path, target) if path.is_file() else self.upload_dir(path, target))

    async def stop(self, delete: bool) -> None:
        """Close the workspace; nothing of it is kept."""
        if self._pool is not None:
            await self._pool.aclose()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command. There is one user, whatever `user` is.

        Raises:
            RuntimeError: It was late, or the workspace has ended.
        """
        timeout_s = float(timeout_sec or self._longest_s)
        result = await self._open.run(
            f"umask 022\n{command}",
            timeout_s=timeout_s,
            cwd=cwd or self._workdir,
            env={**self._variables, **(self._merge_env(env) or {})},
        )
        if result.stopped is not None:
            raise RuntimeError(result.stopped)
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_s:g} seconds")
        code = 1 if result.exit_code is None else result.exit_code
        return ExecResult(stdout=result.output, stderr=None, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Bring a file into the workspace; a target that is a folder, or ends in `/`, keeps the file's name."""
        target = PurePosixPath(target_path)
        if target_path.endswith("/") or await self.is_dir(target_path):
            target /= Path(source_path).name
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(source_path, arcname=target.name)
        await self._open.put(buffer.getvalue(), str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Bring a folder's content into a folder of the workspace."""
        packed = await asyncio.to_thread(pack_dir_to_bytes, source_dir)
        await self._open.put(packed.getvalue(), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Write a file of the workspace to this machine.

        Raises:
            FileNotFoundError: There is no such file.
        """
        source = PurePosixPath(source_path)
        files = await self._files(source.name, path=str(source.parent))
        if source.name not in files:
            raise FileNotFoundError(source_path)
        await asyncio.to_thread(_write, Path(target_path), files[source.name])

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Write the plain files of a folder to this machine; links, pipes and the like are omitted."""
        for name, data in (await self._files(path=source_dir)).items():
            await asyncio.to_thread(_write, Path(target_dir) / name, data)

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        """Do nothing: there is no network, whatever the policy allows."""

    async def _files(self, *names: str, path: str) -> dict[str, bytes]:
        tar = await self._open.get(*names, path=path, max_bytes=_DOWNLOAD_BYTES)
        read = read_tar(tar, max_bytes=_DOWNLOAD_BYTES)
        if read.problem is not None:
            raise RuntimeError(f"the files of {path!r} cannot be read: {read.problem}")
        return read.files

    async def _sure(self, command: str) -> None:
        result = await self._open.run(command)
        if result.exit_code != 0:
            raise WorkspaceError(result.stopped or result.output)

    @property
    def _open(self) -> Workspace:
        if self._workspace is None:
            raise RuntimeError("the workspace is not open")
        return self._workspace


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
