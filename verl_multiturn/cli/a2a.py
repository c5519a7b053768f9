"""`verl-multiturn a2a`: tools for other programs, as the skills of an A2A agent."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.cli.mcp import report_rewards
from verl_multiturn.cli.tool_server import KwargsOption, ToolsArgument
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.proxy.http.listener import address_of, listen, raise_open_files
from verl_multiturn.tools.services.a2a_extension import MISSING


def a2a(
    tools: ToolsArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 9999,
    kwargs: KwargsOption = None,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards",
            help="Show each call's status, reward and metrics in the metadata of its answer, and a session's rewards "
            "at its end, also on standard error.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    most: Annotated[int | None, typer.Option(min=1, help="The most sessions at once (256).")] = None,
    idle_s: Annotated[
        float | None,
        typer.Option(min=0.1, max=86_400, help="Seconds without a call after which a session ends (1800)."),
    ] = None,
) -> None:
    """Serve the tools of a YAML to other programs as the skills of an A2A agent, as they are here.

    Each context is a session with state, limits and kwargs of its own. It has no authentication: listen on an address
    that only trusted programs reach.
    """
    try:
        from verl_multiturn.tool_servers.a2a_server import serve_a2a
    except ImportError:
        fail(MISSING, status=2)
    from verl_multiturn.tool_servers.sessions import IDLE_S, MOST_SESSIONS, ToolHost

    try:
        report = report_rewards if rewards else None
        served = ToolHost.load(tools, kwargs, report=report, most=most or MOST_SESSIONS, idle_s=idle_s or IDLE_S)
        listening = listen(host, port, f"--host {host} --port {port}")
    except MultiTurnError as error:
        refuse(error)
    raise_open_files()
    print(f"serving {len(served.tools)} tools on http://{address_of(listening)}; Ctrl-C ends it", flush=True)
    raise typer.Exit(asyncio.run(serve_a2a(served, tools.stem, listening, host)))
