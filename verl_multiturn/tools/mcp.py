"""MCP tools: the tools of a Model Context Protocol server, over stdio or streamable HTTP, one entry for all of them.

    - mcp:
        command: npx
        args: [-y, some-mcp-server]
        include: [search_*]

The server is asked for its tools once, when the YAML is read; what it lists later is ignored. The calls of all
conversations share one connection (`tools/mcp_connection.py`), so the server has one state for all of them.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import io
import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from mcp import types
from mcp.types import CallToolResult

from verl_multiturn.config import read_model
from verl_multiturn.describe import message_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.mcp_connection import McpSettings, Server, check_settings, list_tools
from verl_multiturn.tools.schema import ToolSchema


def mcp_tools(raw: Any, where: str) -> list[McpTool]:
    """The tools of the server that an entry names.

    Raises:
        ConfigError: a setting that does not fit, a server that does not answer, a pattern that no tool fits, or a tool
            whose schema is none.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping with 'command' or 'url', got {raw!r:.200}")
    settings = read_model(McpSettings, raw, where)
    check_settings(settings, where)
    server = Server(settings, where)
    tools: dict[str, McpTool] = {}
    for listed in _chosen(list_tools(settings, where), settings, where):
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", settings.prefix + listed.name)[:64]
        if name in tools:
            raise ConfigError(
                f"{where}: the server's tools {tools[name].remote_name!r} and {listed.name!r} would both be called "
                f"{name!r}; put one of them under 'exclude'"
            )
        parameters = {key: value for key, value in listed.input_schema.items() if key != "$schema"}
        function = {"name": name, "description": listed.description or "", "parameters": parameters}
        try:
            schema = ToolSchema.read({"type": "function", "function": function}, f"{where}: tool {listed.name!r}")
        except ConfigError as error:
            raise ConfigError(f"{error}; put {listed.name!r} under 'exclude', or mend the server") from None
        hints = listed.annotations
        may_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        tools[name] = (_RepeatableMcpTool if may_repeat else McpTool)(server, listed.name, schema)
    return list(tools.values())


def _chosen(listed: Sequence[types.Tool], settings: McpSettings, where: str) -> list[types.Tool]:
    names = [tool.name for tool in listed]
    for key in ("include", "exclude"):
        for pattern in getattr(settings, key):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:10]
                raise ConfigError(
                    f"{where}.{key}: {pattern!r} fits none of the {len(names)} tools of {settings.label}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                )

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen = [tool for tool in listed if fits(tool.name, settings.include) and not fits(tool.name, settings.exclude)]
    if not chosen:
        raise ConfigError(f"{where}: 'exclude' leaves none of the tools {names}; narrow it")
    return chosen


class McpTool(BaseTool):
    """One tool of a server. It has no state per conversation, and takes no kwargs of a row."""

    schema_of_others = True
    """Its names are the server's, not this run's author's."""

    def __init__(self, server: Server, remote_name: str, schema: ToolSchema) -> None:
        super().__init__({}, schema)
        self.server = server
        self.remote_name = remote_name

    async def create(self, instance_id: str) -> None:  # type: ignore[override]
        """Nothing to begin."""

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> ToolResponse:  # type: ignore[override]
        return await read_result(await self.server.call(self.remote_name, parameters))

    async def aclose(self) -> None:
        """Close the connection of this event loop, which the server's other tools use too."""
        await self.server.aclose()


class _RepeatableMcpTool(McpTool):
    """Its server says that calling it twice does no harm."""

    repeatable = True


async def read_result(result: CallToolResult) -> ToolResponse:
    """A server's answer as a tool's.

    Raises:
        ValueError: the server says that the call failed.
    """
    texts: list[str] = []
    pictures: list[str] = []
    for part in result.content:
        if isinstance(part, types.TextContent):
            texts.append(part.text)
        elif isinstance(part, types.ImageContent):
            pictures.append(part.data)
        elif isinstance(part, types.ResourceLink):
            texts.append(str(part.uri))
        elif isinstance(part, types.EmbeddedResource):
            resource = part.resource
            texts.append(resource.text if isinstance(resource, types.TextResourceContents) else str(resource.uri))
        else:
            texts.append(f"[{part.type} that cannot be shown]")
    if result.is_error:
        raise ValueError("\n".join(texts) or "the tool failed and did not say why")
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    # Decoding takes a while, and the event loop is everybody's.
    images = await asyncio.to_thread(_decode, pictures) if pictures else None
    return ToolResponse("\n".join(texts), images)


def _decode(pictures: Sequence[str]) -> list[Any]:
    from PIL import Image  # large, and few tools have pictures

    images = []
    for picture in pictures:
        try:
            image = Image.open(io.BytesIO(base64.b64decode(picture)))
            image.load()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise RuntimeError(f"the tool server sent an image that cannot be read: {message_of(error)}") from None
        images.append(image)
    return images
