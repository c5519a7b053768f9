"""Settings of an MCP server: the value of `mcp` in an entry of the YAML of tools, and the checks of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Literal

from mcp.client.stdio import get_default_environment
from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.clients.http_connections import route_to
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.services.environment_variables import expand, header, shown

_OWN = re.compile(r"\$\{(conversation\.[^}]*)\}")
FOLDER = "${conversation.folder}"
"""In `args`, `env` and `cwd`: a new, empty folder of the server's one conversation, which ends with the server."""
ID = "${conversation.id}"
"""In `args`, `env`, `url` and `headers`: a random name of the server's one conversation."""


class McpSettings(BaseModel):
    """Settings under `mcp`.

    Values of `env`, `headers` and `url` may hold `${NAME}`, an environment variable. With `per: conversation` a value
    may also hold `${conversation.folder}` or `${conversation.id}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    """Program that speaks MCP over its standard input and output; `python` is the interpreter of this process."""
    args: list[str] = Field(default=[])
    env: dict[str, str] = Field(default={})
    """Environment of the program, beside HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets no other variable."""
    cwd: str | None = None
    """Folder in which the program runs; null: the worker's."""

    url: str | None = None
    """Address of a server that speaks MCP over streamable HTTP."""
    headers: dict[str, str] = Field(default={})

    include: list[str] = Field(default=["*"])
    """Patterns (`fnmatch`) of the server's tools that the model gets."""
    exclude: list[str] = Field(default=[])
    """Patterns of the server's tools that the model does not get, although `include` names them."""
    prefix: str = ""
    """Text put before each tool's name."""
    start_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that the server may take to start and to list its tools."""

    per: Literal["worker", "conversation"] = "worker"
    """Whose the server's state is: that of all conversations of a worker, which share one connection, or that of one
    conversation, which gets a process (`command`) or a session of the protocol (`url`) of its own."""
    ready: int = Field(default=4, ge=0)
    """Processes that are kept started for the next conversations, with `command` and `per: conversation`."""
    most: int = Field(default=64, ge=1)
    """Most processes, or sessions, of a worker at once with `per: conversation`: those that are ready, serve or end.

    Further conversations wait, at most for the `queue_timeout_s` of the entry's `limits`."""

    @property
    def names_conversation(self) -> bool:
        """Return whether the address or a header holds the name of the conversation."""
        return any(ID in value for value in (self.url or "", *self.headers.values()))

    @property
    def label(self) -> str:
        """Name of the server in messages, without its arguments, user and password, which may hold secrets."""
        return repr(self.command or shown(self.url or ""))


def check_settings(settings: McpSettings, where: str) -> None:
    """Check rules that pydantic cannot.

    Args:
        settings: The settings of the server.
        where: The place that errors name, for example `tools.yaml: tools[0].mcp`.

    Raises:
        ConfigError: `command` and `url` are both given or both missing, a setting belongs to the other kind of server,
            an environment variable is not set, a header cannot hold its value, there is no such program or folder, or
            the network's proxy, by which the server is reached, cannot be used.
    """
    if (settings.command is None) == (settings.url is None):
        raise ConfigError(f"{where}: expected either 'command' or 'url'; give one of them")
    kind, foreign = ("url", {"args", "env", "cwd", "ready"}) if settings.url else ("command", {"headers"})
    if wrong := sorted(foreign & settings.model_fields_set):
        raise ConfigError(f"{where}.{wrong[0]}: means nothing to a server with {kind!r}; remove it")
    if settings.per == "worker" and (wrong := sorted({"ready", "most"} & settings.model_fields_set)):
        raise ConfigError(f"{where}.{wrong[0]}: means nothing with 'per: worker'; remove it, or set per: conversation")
    if settings.command and settings.ready > settings.most:
        raise ConfigError(
            f"{where}.ready: {settings.ready} processes cannot be ready where there are at most {settings.most}; "
            "lower 'ready', or raise 'most'"
        )
    _check_placeholders(settings, where)
    if settings.url:
        for name, value in settings.headers.items():
            header(value, f"{where}.headers.{name}")
        route_to(expand(settings.url, f"{where}.url"), f"{where}.url")
    else:
        check_program(settings, where)


def _check_placeholders(settings: McpSettings, where: str) -> None:
    """Refuse placeholders that are unknown, have no value at their place, or name a conversation that has no server."""
    texts = {f"{where}.args[{index}]": value for index, value in enumerate(settings.args)}
    texts |= {f"{where}.env.{name}": value for name, value in settings.env.items()}
    texts |= {f"{where}.headers.{name}": value for name, value in settings.headers.items()}
    texts |= {f"{where}.{name}": value for name in ("command", "cwd", "url") if (value := getattr(settings, name))}
    for place, text in texts.items():
        for found in _OWN.finditer(text):
            known = [FOLDER, ID] if settings.command else [ID]
            if found[0] not in known or place == f"{where}.command":
                raise ConfigError(f"{place}: {found[0]!r} has no value here; known are {known}, but not in 'command'")
            if settings.per == "worker":
                raise ConfigError(
                    f"{place}: {found[0]!r} is of one conversation, and all conversations share the server; "
                    "set per: conversation"
                )
    if settings.cwd is not None and _OWN.search(settings.cwd) and settings.cwd != FOLDER:
        raise ConfigError(f"{where}.cwd: expected {FOLDER!r} alone, got {settings.cwd!r}; remove the rest")


class ConversationValues:
    """Values of the placeholders of one server: the name of its conversation, and the folder where it has one.

    Args:
        settings: The settings of the server.

    Attributes:
        id: The name.
        folder: The path of the folder, which is made here; "" where no setting names it.
    """

    def __init__(self, settings: McpSettings) -> None:
        self.id = uuid.uuid4().hex
        texts = [*settings.args, *settings.env.values(), settings.cwd or ""]
        self.folder = tempfile.mkdtemp(prefix="verl-multiturn-mcp-") if any(FOLDER in text for text in texts) else ""

    def fill(self, value: str) -> str:
        """Return a value with the placeholders replaced."""
        return value.replace(FOLDER, self.folder).replace(ID, self.id)


def check_program(
    settings: McpSettings, where: str, own: ConversationValues | None = None
) -> tuple[str, Path, dict[str, str]]:
    """Return the program of a server, the folder in which it runs and its environment.

    Args:
        settings: The settings of the server.
        where: As in `check_settings`.
        own: Values of the placeholders; None: before there is a server.

    Raises:
        ConfigError: There is no such program or folder, or an environment variable is not set.
    """
    fill = str if own is None else own.fill
    env = {name: fill(expand(value, f"{where}.env.{name}")) for name, value in settings.env.items()}
    command = str(settings.command)
    if command in ("python", "python3"):
        command = sys.executable
    there = Path(fill(settings.cwd or ".") if own or settings.cwd != FOLDER else ".").expanduser()
    if not there.is_dir():
        raise ConfigError(f"{where}.cwd: {settings.cwd!r} is no folder")
    path = (get_default_environment() | env).get("PATH", os.defpath)
    if shutil.which(str(there / command) if os.sep in command else command, path=path) is None:
        raise ConfigError(f"{where}.command: there is no program {command!r}; install it, or give its full path")
    return command, there, env
