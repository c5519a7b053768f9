"""MCP tools: the tools of a Model Context Protocol server, over stdio or streamable HTTP.

One entry of the YAML file covers all tools of the server:

    - mcp:
        command: npx
        args: [-y, some-mcp-server]
        include: [search_*]

The server lists its tools once, when the YAML is read, and goes on for its use. Tools that it lists later are ignored.
By default the calls of all conversations share one connection, and so the server's state; with `per: conversation` each
conversation has a server of its own (`tools/services/mcp_servers.py`), from the first `create` of its tools to the last
`release`.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from mcp import types
from mcp.types import CallToolResult

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.json_schema.validators import without_draft
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.loading.tool_filter import chosen_names
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.mcp_listing import ToolListing
from verl_multiturn.tools.services.mcp_servers import McpServer
from verl_multiturn.tools.services.mcp_settings import McpSettings, check_settings
from verl_multiturn.tools.services.pictures import decode_pictures

SCHEMA_META = "verl-multiturn/schema"
"""Key in a tool's `_meta` under which a server of ours has its whole schema, where MCP has no place for some of it."""


def mcp_tools(raw: Any, where: str) -> list[McpTool]:
    """Return the tools of the server that an entry names, after asking the server for them.

    Args:
        raw: The value of `mcp` in the entry.
        where: The place that errors name, for example `tools.yaml: tools[0].mcp`.

    Raises:
        ConfigError: A setting is wrong, the server does not answer, a pattern matches no tool, two tools would have one
            name, or the protocol or our check refuses a tool, which the error names. A tool that is not chosen is not
            examined.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping with 'command' or 'url', got {raw!r:.200}")
    settings = read_model(McpSettings, raw, where)
    check_settings(settings, where)
    server = McpServer(settings, where)
    try:
        tools = _tools_of(server, server.list_tools(), settings, where)
    except BaseException:  # cancelled, too: nobody else closes it
        server.close()  # the error may be kept, and what it holds
        raise
    server.choose([tool.remote_name for tool in tools])
    for tool in tools:
        tool.siblings = tuple(tools)
    return tools


def _tools_of(server: McpServer, listing: ToolListing, settings: McpSettings, where: str) -> list[McpTool]:
    """Return the chosen tools of a list."""
    chosen = chosen_names(listing.names, settings.include, settings.exclude, settings.label, where)
    tools: dict[str, McpTool] = {}
    problems = {name: f"it does not fit the protocol: {why}" for name, why in listing.refused.items() if name in chosen}
    for listed in listing.tools:
        if listed.name not in chosen:
            continue
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", settings.prefix + listed.name)[:64]
        if name in tools:
            raise ConfigError(f"{where}: {_twins(tools[name].remote_name, listed.name, name, settings)}")
        function = _whole(listed) or {
            "name": name,
            "description": listed.description or "",
            "parameters": without_draft(listed.input_schema),
        }
        function["name"] = name
        try:
            schema = ToolSchema.read({"type": "function", "function": function}, "its schema")
        except ConfigError as error:
            problems[listed.name] = str(error)
            continue
        hints = listed.annotations
        may_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        tools[name] = (_RepeatableMcpTool if may_repeat else McpTool)(server, listed.name, schema)
    if problems:
        name, why = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more of its tools)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{where}: tool {name!r} of {settings.label} cannot be used, {why}{more}; put "
            f"{', '.join(map(repr, problems))} under 'exclude', or mend the server"
        )
    return list(tools.values())


def _whole(listed: types.Tool) -> dict[str, Any] | None:
    """Return the function that a server of ours has in `_meta`; None where it says something else than the listing."""
    schema = (listed.meta or {}).get(SCHEMA_META)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict):
        return None
    own = function.get("parameters", listed.input_schema)
    own = {key: value for key, value in own.items() if value is not None} if isinstance(own, dict) else own
    said = [function.get("name"), function.get("description"), own]
    return dict(function) if said == [listed.name, listed.description, listed.input_schema] else None


def _twins(one: str, other: str, name: str, settings: McpSettings) -> str:
    """Report which tools of a server would have one name, and the remedy."""
    if one == other:
        return f"{settings.label} lists two tools called {one!r}; put {one!r} under 'exclude', or mend the server"
    return f"the server's tools {one!r} and {other!r} would both be called {name!r}; put one of them under 'exclude'"


class McpTool(BaseTool):
    """One tool of an MCP server. It takes no kwargs of a row.

    Args:
        server: The server, or the servers of all conversations.
        remote_name: The tool's name on the server.
        schema: The schema of the tool, with the name that the model uses.

    Attributes:
        siblings: All tools of the entry, this one too.
    """

    outage_limits = OutageLimits(addresses="service")
    schema_of_others = True
    """True: the schema's names come from the server, so the author of the run cannot change them."""

    def __init__(self, server: McpServer, remote_name: str, schema: ToolSchema) -> None:
        super().__init__({}, schema)
        self.server = server
        self.remote_name = remote_name
        self.siblings: tuple[McpTool, ...] = (self,)

    @property
    def places(self) -> McpServer | None:
        """Return the places of which a conversation needs one; None where all conversations share one server."""
        return None if self.server.settings.per == "worker" else self.server

    async def create(self, instance_id: str) -> None:  # type: ignore[override]
        """Let the conversation have a server, where each has its own.

        Raises:
            ServerAwayError: It does not start.
        """
        if self.places is not None:
            await self.server.enter(instance_id, self.name)

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> ToolResponse:  # type: ignore[override]
        """Call the server's tool.

        Raises:
            ValueError: The server refuses the call, or reports that it failed.
            ServerAwayError: There is no connection.
            RuntimeError: The connection ended during the call, or the answer cannot be read.
        """
        return await read_result(await self.server.call(instance_id, self.remote_name, parameters))

    async def release(self, instance_id: str) -> None:  # type: ignore[override]
        """End the conversation's server once its last tool is released; nothing waits for the end of the process."""
        if self.places is not None:
            self.server.leave(instance_id, self.name)

    async def aclose(self) -> None:
        """Close the connections, which the server's other tools use, too."""
        await self.server.aclose()


class _RepeatableMcpTool(McpTool):
    """A tool whose server declares that calling it twice does no harm (`readOnlyHint` or `idempotentHint`)."""

    repeatable = True


async def read_result(result: CallToolResult) -> ToolResponse:
    """Turn a server's answer into a tool's response.

    Args:
        result: The server's answer.

    Raises:
        ValueError: The server reports that the call failed.
        RuntimeError: An image in the answer cannot be read.
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
    # Decode in a thread: it takes a while, and would block the event loop.
    images = await asyncio.to_thread(decode_pictures, pictures) if pictures else None
    return ToolResponse("\n".join(texts), images)
