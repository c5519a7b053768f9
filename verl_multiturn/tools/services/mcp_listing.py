"""Tools that an MCP server lists, one by one.

The client reads a page of tools as a whole, so that one tool which the protocol does not allow would take all others
with it. Here such a tool is taken out of the page before the client reads it, and kept by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from mcp.types import Tool
from mcp.types.methods import parse_server_result
from pydantic import ValidationError

from verl_multiturn.json_schema.validators import SchemaError, compile_schema

_METHOD = "tools/list"


class ToolListing:
    """The tools of a server, as far as its pages were read.

    Attributes:
        version: Version of the protocol that client and server speak; None until they have agreed on one.
        tools: The tools that the protocol allows.
        refused: Why the protocol or the client refuses each other tool, by its name, or by `#` and its place on its
            page where it has none.
        has_session: Whether a server over HTTP has opened a session of the protocol.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self.tools: list[Tool] = []
        self.refused: dict[str, str] = {}
        self.has_session: Callable[[], bool] = lambda: False

    @property
    def names(self) -> list[str]:
        """Return the names of all tools."""
        return [tool.name for tool in self.tools] + list(self.refused)

    def differences(self, later: ToolListing, chosen: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare this list with a later one of the same server.

        Args:
            later: The later list.
            chosen: Names of the tools that are compared.

        Returns:
            The tools that the later list does not have, and those that have another description or schema there.
        """
        now = {tool.name: tool for tool in later.tools}
        before = {tool.name: tool for tool in self.tools if tool.name in chosen}
        changed = [
            name
            for name, tool in before.items()
            if name in now and (tool.description, tool.input_schema) != (now[name].description, now[name].input_schema)
        ]
        return [name for name in before if name not in now], changed

    def sift(self, item: Any) -> None:
        """Take the tools that the protocol refuses out of a server's message, if it is a page of tools.

        Args:
            item: The transport's item: a message with its metadata, or an error.
        """
        result = getattr(getattr(item, "message", None), "result", None)
        if self.version is None or not isinstance(result, dict) or "content" in result:
            return
        if isinstance(listed := result.get("tools"), list):
            result["tools"] = [tool for index, tool in enumerate(listed) if self._is_allowed(tool, index, result)]

    def _is_allowed(self, tool: Any, index: int, page: dict[str, Any]) -> bool:
        assert self.version is not None
        try:
            parse_server_result(_METHOD, self.version, {**page, "tools": [tool]})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"][:1] != ("tools",):
                return True  # the page is wrong, and the client reports it
            path = ".".join(map(str, first["loc"][2:])) or "the tool"
            problem = f"{path}: {first['msg']}"
        except (KeyError, ValueError):  # a version that this check does not know
            return True
        else:
            problem = _wrong_output(tool.get("outputSchema"))
        if problem:
            name = tool.get("name") if isinstance(tool, dict) else None
            self.refused[name if isinstance(name, str) else f"#{index}"] = problem
        return not problem


def _wrong_output(schema: dict[str, Any] | None) -> str:
    """Return why the client could check no answer against a schema; "" if it can."""
    if schema is None:
        return ""
    try:
        compile_schema(schema)
    except SchemaError as error:
        if error.path != ("$schema",):  # the client reads an unknown draft as the newest
            return f"{'.'.join(map(str, ('outputSchema', *error.path)))}: {error}"
    return ""
