"""`verl-multiturn mcp`: tools for other programs, over the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.cli.tool_server import KwargsOption, ToolsArgument
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.proxy.http.listener import address_of, listen, raise_open_files


def mcp(
    tools: ToolsArgument,
    http: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve over streamable HTTP on this port; 0: any that is free. Without it: over stdio, one session.",
        ),
    ] = None,
    kwargs: KwargsOption = None,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards",
            help="Show each call's status, reward and metrics in its `_meta`, and a session's rewards at its end on "
            "standard error.",
        ),
    ] = False,
    host: Annotated[str | None, typer.Option(help="With --http: address to listen on (127.0.0.1).")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="With --http: the most sessions at once (256).")] = None,
    idle_s: Annotated[
        float | None,
        typer.Option(min=0.1, max=86_400, help="With --http: seconds without use after which a session ends (1800)."),
    ] = None,
) -> None:
    """Serve the tools of a YAML to other programs over MCP, as they are here.

    Each session has state, limits and kwargs of its own. It has no authentication: listen on an address that only
    trusted programs reach.
    """
    try:
        from verl_multiturn.tool_servers.mcp_http import serve_http  # with the SDK
        from verl_multiturn.tool_servers.mcp_server import PATH, Wire, serve_stdio
        from verl_multiturn.tool_servers.serving import LOOPBACK
        from verl_multiturn.tool_servers.sessions import IDLE_S, MOST_SESSIONS, ToolHost
    except ImportError as error:
        fail(f"a server needs mcp 2.3 ({error}); pip install 'mcp>=2.3'", status=2)
    if http is None:
        for option, value in {"--host": host, "--most": most, "--idle-s": idle_s}.items():
            if value is not None:
                fail(f"{option} {value}: means nothing over stdio: a process is one session; add --http", status=2)
        if sys.stdin is not None and sys.stdin.isatty():
            print("speaking MCP over standard input; Ctrl-C ends it, --http PORT serves over HTTP", file=sys.stderr)
    report = report_rewards if rewards else None
    try:
        if http is None:
            wire = Wire()
            try:  # an error, too, has to be written before the end
                served = ToolHost.load(tools, kwargs, report=report, idle_s=None)
                status = asyncio.run(serve_stdio(served, wire))
            finally:
                wire.close()
        else:
            address = host or LOOPBACK[0]
            served = ToolHost.load(tools, kwargs, report=report, most=most or MOST_SESSIONS, idle_s=idle_s or IDLE_S)
            listening = listen(address, http, f"--host {address} --http {http}")
            raise_open_files()
            said = f"serving {len(served.tools)} tools on http://{address_of(listening)}{PATH}; Ctrl-C ends it"
            print(said, flush=True)
            status = asyncio.run(serve_http(served, listening, address))
    except MultiTurnError as error:
        refuse(error)
    raise typer.Exit(status)


def report_rewards(session: str, rewards: Mapping[str, float]) -> None:
    """Print the rewards of a session that has ended, as one line of JSON."""
    with contextlib.suppress(OSError):  # a client that was killed took its end of the pipe with it
        print(json.dumps({"session": session, "rewards": rewards}), file=sys.stderr, flush=True)
