"""`verl-multiturn mcp`: tools for other programs, over the Model Context Protocol."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import refuse
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.proxy.http.listener import address_of, listen, raise_open_files


def mcp(
    tools: Annotated[Path, typer.Argument(metavar="TOOLS.yaml", help="A tool YAML.")],
    http: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve over streamable HTTP on this port; 0: any that is free. Without it: over stdio, one session.",
        ),
    ] = None,
    kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Kwargs of every session, as a data row gives them in `tools_kwargs`."),
    ] = None,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards",
            help="Show each call's status, reward and metrics in its `_meta`, and a session's rewards at its end on "
            "standard error.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    most: Annotated[int, typer.Option(min=1, help="The most sessions at once.")] = 256,
    idle_s: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds without use after which a session over HTTP ends.")
    ] = 1800.0,
) -> None:
    """Serve the tools of a YAML to other programs over MCP, as they are here.

    Each session has state, limits and kwargs of its own. It has no authentication: listen on an address that only
    trusted programs reach.
    """
    from verl_multiturn.tool_servers.mcp_server import PATH, Wire, serve_http, serve_stdio  # with the SDK
    from verl_multiturn.tool_servers.sessions import ToolHost

    wire = Wire() if http is None else None
    try:
        report = _report if rewards else None
        served = ToolHost.load(tools, kwargs, report=report, most=most, idle_s=None if wire else idle_s)
        listening = None if http is None else listen(host, http, f"--host {host} --http {http}")
    except MultiTurnError as error:
        refuse(error)
    if wire is not None:
        status = asyncio.run(serve_stdio(served, wire))
    else:
        assert listening is not None
        raise_open_files()
        print(f"serving {len(served.tools)} tools on http://{address_of(listening)}{PATH}; Ctrl-C ends it", flush=True)
        status = asyncio.run(serve_http(served, listening, host))
    raise typer.Exit(status)


def _report(session: str, rewards: Mapping[str, float]) -> None:
    """Print the rewards of a session that has ended, as one line of JSON."""
    print(json.dumps({"session": session, "rewards": rewards}), file=sys.stderr, flush=True)
