"""`BashTool`: a folder and a shell for each conversation, in a workspace (`workspaces/`).

The workspace is made in `create` with the files that the row names, and ends in `release`. The model reads a command's
output, and its exit status where that is not 0.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import FunctionSchema, ToolSchema
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import write_tar
from verl_multiturn.workspaces.workspace import CommandResult, Workspace, WorkspaceError, WorkspacePool, check

_KEPT_BYTES = 256 * 2**20
"""Bytes of the tars that a worker keeps together: a node has several workers, and rows may name folders of any size."""


class BashSettings(WorkspaceSettings):
    """Settings of the tool: those of a workspace, and one more."""

    root: Path | None = Field(default=None)
    """Folder of the folders and tars that rows name; without it, rows may only give `files`."""


class BashTool(BaseTool):
    """The tool `bash(command, timeout_s)`: a folder and a shell that the conversation keeps.

    Args:
        config: The fields of `BashSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Attributes:
        workspaces: Settings of the workspaces.

    Raises:
        ConfigError: A setting is wrong, the schema does not require `command`, `root` is not a folder, or workspaces do
            not work on this machine.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(BashSettings, config, "config")
        super().__init__(config, tool_schema)
        if "command" not in self.tool_schema.function.parameters.get("required", []):
            raise ConfigError(f"tool_schema of {self.name!r} does not require an argument 'command'; add it")
        root = self._settings.root
        if root is not None and not root.is_dir():
            raise ConfigError(f"config.root: {str(root)!r} is no folder; give the folder of what the rows name")
        self._root = None if root is None else root.resolve()
        self.workspaces = WorkspaceSettings.model_validate(self._settings.model_dump(exclude={"root"}))
        check(self.workspaces)
        self._pool = WorkspacePool(self.workspaces)
        self._workspaces: dict[str, Workspace] = {}

    def get_schema(self) -> ToolSchema:
        """Return the schema; its description names the settings that the model should know."""
        settings = self._settings
        about = (
            "Run a command in bash. You see what it prints, and its exit code if that is not 0. Files stay between "
            "calls; the current folder and variables do not. No network, no input. "
            f"A command is stopped after {settings.timeout_s:g} s, or after `timeout_s`."
        )
        longest_s = max(settings.timeout_s, settings.longest_timeout_s)
        parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command, for example: ls -la && python -m pytest -q"},
                "timeout_s": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "maximum": longest_s,
                    "description": f"Seconds that the command may take, at most {longest_s:g}.",
                },
            },
            "required": ["command"],
        }
        return ToolSchema(
            type="function", function=FunctionSchema(name="bash", description=about, parameters=parameters)
        )

    async def create(
        self,
        instance_id: str,
        *,
        files: dict[str, str | None] | None = None,
        folder: str | None = None,
        tar: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Open the conversation's workspace, and put the row's files into its folder.

        Args:
            instance_id: Id of the conversation.
            files: Text of each file, by its path. They are put last.
            folder: A folder under `root` whose content is put.
            tar: A tar under `root`, compressed or not, that is unpacked inside.
            kwargs: Not used.

        Raises:
            ConfigError: The row names something that is not there, or whose files do not fit.
            SandboxError: No workspace could be started.
        """
        await self._open(instance_id, await asyncio.to_thread(self._tars, files, folder, tar))

    async def _open(self, instance_id: str, tars: Sequence[bytes]) -> None:
        """Open the conversation's workspace, and unpack tars into its folder."""
        workspace = self._workspaces[instance_id] = await self._pool.open()
        for content in tars:
            try:
                await workspace.put(content)
            except WorkspaceError as error:
                raise ConfigError(f"create_kwargs: {error}; mend the row, or raise disk_mb") from None

    def _tars(self, files: dict[str, str | None] | None, folder: str | None, tar: str | None) -> list[bytes]:
        found = []
        if not isinstance(files, dict | None):
            raise ConfigError(f"create_kwargs.files: expected the text of each file by its path, got {files!r:.200}")
        # Parquet gives every row the keys of all rows, with None where a row has no value.
        texts = {path: text for path, text in (files or {}).items() if text is not None}
        if folder is not None:
            found.append(_TARS.of(self._find("folder", folder, is_folder=True)))
        if tar is not None:
            found.append(self._find("tar", tar, is_folder=False).read_bytes())
        if texts:
            if not all(isinstance(text, str) for text in texts.values()):
                raise ConfigError(f"create_kwargs.files: expected the text of each file, got {files!r:.200}")
            try:
                found.append(write_tar({path: text.encode() for path, text in texts.items()}))
            except UnicodeEncodeError as error:
                raise ConfigError(f"create_kwargs.files: a text cannot be written in UTF-8: {error}") from None
        return found

    def _find(self, key: str, name: str, *, is_folder: bool) -> Path:
        """Return the path under `root` of a name in a row."""
        given = f"create_kwargs.{key}: {name!r}"
        if self._root is None:
            raise ConfigError(f"{given} needs config.root, the folder that it lies in; set it in the tool's YAML")
        try:
            path = (self._root / name).resolve()
            is_there = path.is_dir() if is_folder else path.is_file()
        except (OSError, TypeError, ValueError, RuntimeError) as error:  # a null byte, or a name that is too long
            raise ConfigError(f"{given} is no path: {error}; mend the row") from None
        if not is_there or not path.is_relative_to(self._root):
            kind = "folder" if is_folder else "file"
            raise ConfigError(f"{given} is no {kind} under {str(self._root)!r}; mend the row or config.root")
        return path

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Run a command.

        Raises:
            ValueError: The workspace has ended, for example because the command killed all its processes; or
                `timeout_s` is out of its range, where another schema allowed it.
            SandboxError: All workspaces were lost.
        """
        workspace = self._workspaces[instance_id]
        timeout_s = parameters.get("timeout_s")
        longest_s = max(self._settings.timeout_s, self._settings.longest_timeout_s)
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= longest_s):
            raise ValueError(f"timeout_s is {timeout_s!r}; write a number above 0, at most {longest_s:g}")
        variables = self._variables(instance_id)
        result = await workspace.run(parameters["command"], timeout_s=timeout_s, env=variables)
        if result.stopped is not None:
            raise ValueError(f"{result.stopped}; its files are lost, and no further command can run")
        return ToolResponse(text=_shown(result, self._settings.timeout_s if timeout_s is None else timeout_s))

    def _variables(self, instance_id: str) -> Mapping[str, str]:
        """Return the environment variables of a conversation's commands; a class that derives may have some."""
        return {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the conversation's workspace, and wait until no process of it remains."""
        workspace = self._workspaces.pop(instance_id, None)
        if workspace is not None:
            workspace.close()
            await workspace.wait_gone()

    async def aclose(self) -> None:
        """End all workspaces; a later call would start new ones."""
        await self._pool.aclose()


def _shown(result: CommandResult, timeout_s: float) -> str:
    """Return the text of a result for the model."""
    note = ""
    if result.timed_out:
        note = f"[the command was stopped after {timeout_s:g} s, with all other processes]"
    elif result.exit_code is not None and result.exit_code != 0:
        note = f"[exit code {result.exit_code}]"
    if not result.output:
        return note or "(no output)"
    return result.output if not note else result.output.removesuffix("\n") + f"\n{note}"


class _Tars:
    """Tars of folders, kept since the requests of a group have one row. Those unused for longest are dropped first."""

    def __init__(self) -> None:
        self._kept: dict[Path, bytes] = {}
        self._lock = threading.Lock()

    def of(self, folder: Path) -> bytes:
        """Return a tar of a folder's content: the one that is kept, or a new one."""
        with self._lock:
            tar = self._kept.get(folder)
        if tar is None:
            tar = _packed(folder)
        if len(tar) > _KEPT_BYTES:
            return tar  # to keep it would drop all others, and it, too
        with self._lock:
            self._kept.pop(folder, None)
            self._kept[folder] = tar  # the last, as the one used last
            while sum(map(len, self._kept.values())) > _KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return tar


_TARS = _Tars()


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name)
    return packed.getvalue()
