"""An MCP server over stdio as a tool. The conversations of a worker share the server, and so its state."""

import asyncio
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from verl_multiturn import scripted_rollout
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.mcp_tools import mcp_tools

server = MCPServer("notes", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def write_note(text: str) -> str:
    """Write a note down."""
    if not text.strip():
        raise ToolError("an empty note")
    notes.append(text)
    return f"{len(notes)} note(s)"


async def main() -> None:
    entry = {"command": "python", "args": [__file__, "serve"], "include": ["write_*"]}  # `mcp:` in a tool YAML
    tools = mcp_tools(entry, "example")
    print("tools:", [tool.name for tool in tools])
    for text in ("tea", "milk", " "):  # three conversations
        outcome = await scripted_rollout(tools, [tool_call("write_note", {"text": text}), "Done."], "Note it.")
        print(f"{outcome.calls[0].status}: {outcome.calls[0].text}")
    await tools[0].aclose()  # a training run does this when its worker ends


if sys.argv[1:] == ["serve"]:
    server.run("stdio")
else:
    asyncio.run(main())
