"""`verl-multiturn view`: shows a run's conversations in a browser, from a server of this machine or as one file."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli.ends import fail, open_records, refuse
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import check_target, export
from verl_multiturn.observe.view.server import ViewServer


def view(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="A run's folder, its folder of records, or a file; two are compared."),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Show what is written while the page is open, too.")] = False,
    file: Annotated[
        Path | None, typer.Option("--export", help="Write one HTML file that needs no server, in the place of serving.")
    ] = None,
    where: Annotated[
        str, typer.Option(help="With --export: which conversations, such as 'score<1 trained_step>=3'.")
    ] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer, where the run's own is not on this machine.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 0,
) -> None:
    """Show a run's conversations in a browser: token by token, group by group, step by step.

    It prints an address of this machine, and serves until Ctrl-C. The last line is a JSON object.
    """
    try:
        if where and file is None:
            raise ConfigError(f"--where {where!r} is for --export; in the page, use the table's filter")
        if file is not None:
            check_target(file)
        documents = Documents(folders, tokenizer)
        for folder in [] if follow else folders:  # a run that is followed may yet begin
            open_records(folder)
        documents.refresh()
        if file is not None:
            print(json.dumps(export(documents, file, where)))
            return
        if problem := documents.save():
            print(problem, file=sys.stderr)
        print(json.dumps(asyncio.run(_serve(documents, follow, port))))
    except MultiTurnError as error:
        refuse(error)


async def _serve(documents: Documents, follow: bool, port: int) -> dict[str, Any]:
    """Serve until Ctrl-C or SIGTERM, and return the shown documents."""
    server = ViewServer(documents, follow=follow)
    done = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, done.set)
    try:
        try:
            print(await server.start(port), flush=True)
        except OSError as error:
            fail(f"--port {port}: cannot listen there ({error}); name a free port, or --port 0", status=2)
        print("Ctrl-C ends it.", flush=True)
        await done.wait()
    finally:
        await server.aclose()
    return {"conversations": len(documents.table.whole), "faults": len(documents.faults())}
