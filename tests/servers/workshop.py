"""An MCP server whose tools do all that a server can do: `python workshop.py stdio`, `python workshop.py http PORT`."""

import asyncio
import base64
import io
import os
import signal
import sys
import time

import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, ResourceLink, TextContent, ToolAnnotations

server = MCPServer("workshop", log_level="CRITICAL")
cancelled: list[str] = []
present = running = 0
everybody = asyncio.Event()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def echo(text: str, delay_s: float = 0) -> str:
    """Repeat it, after a while."""
    await asyncio.sleep(delay_s)
    return text


@server.tool()
async def meet(count: int) -> str:
    """Answer when `count` calls are waiting at the same time."""
    global present
    present += 1
    if present == count:
        everybody.set()
    await everybody.wait()
    return "met"


@server.tool()
async def beside() -> str:
    """Return the most calls of this tool that ran beside this one, itself included."""
    global running
    running += 1
    most = running
    for _ in range(10):
        await asyncio.sleep(0.01)
        most = max(most, running)
    running -= 1
    return str(most)


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "")


@server.tool()
def header(name: str, ctx: Context) -> str:
    """Return a header of the request."""
    return str(ctx.headers.get(name, "")) if ctx.headers else ""


@server.tool()
def pid() -> str:
    """Return the id of the process that answers."""
    return str(os.getpid())


@server.tool()
def fail(text: str) -> str:
    """Fail, with the reason."""
    raise ToolError(text)


@server.tool()
async def die(delay_s: float = 0) -> str:
    """End the server during the call."""
    await asyncio.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


@server.tool()
async def hang(name: str = "") -> str:
    """Never answer."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(name)
        raise
    return "not reached"


@server.tool()
def cancellations() -> str:
    """Return the names of the calls of `hang` that were cancelled."""
    return " ".join(cancelled)


@server.tool()
async def freeze() -> str:
    """Stop the whole server, which then sees neither other calls nor the end of its input."""
    time.sleep(3600)  # noqa: ASYNC251 that is its purpose
    return "not reached"


@server.tool(structured_output=False)
def flood(megabytes: int) -> str:
    """Return a long answer."""
    return "x" * (megabytes * 1024 * 1024)


@server.tool(structured_output=False)
def picture() -> CallToolResult:
    """Return a red square, and a word about it."""
    from PIL import Image as Pillow

    data = io.BytesIO()
    Pillow.new("RGB", (8, 8), "red").save(data, "PNG")
    return CallToolResult(
        content=[
            TextContent(text="a square"),
            ImageContent(data=base64.b64encode(data.getvalue()).decode(), mime_type="image/png"),
        ]
    )


@server.tool(structured_output=False)
def broken_picture() -> Image:
    """Return bytes that are not a picture."""
    return Image(data=b"no picture", format="png")


@server.tool(structured_output=False)
def structured() -> CallToolResult:
    """Return an answer without a text."""
    return CallToolResult(content=[], structured_content={"answer": 42, "unit": "µm"})


@server.tool(structured_output=False)
def link() -> CallToolResult:
    """Return a link to more."""
    return CallToolResult(content=[ResourceLink(name="more", uri="https://example.org/more")])


@server.tool(name="odd name/with:signs")
def odd() -> str:
    """Answer under a name that no chat template's schema allows."""
    return "odd"


async def serve(port: int) -> None:
    """Serve over HTTP, and print the port on standard output."""
    config = uvicorn.Config(server.streamable_http_app(), host="127.0.0.1", port=port, log_level="error")
    web = uvicorn.Server(config)
    serving = asyncio.create_task(web.serve())
    while not web.started:  # noqa: ASYNC110 uvicorn sets no event
        await asyncio.sleep(0.01)
    print(web.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        asyncio.run(serve(int(sys.argv[2])))
