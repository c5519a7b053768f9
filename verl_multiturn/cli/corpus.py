"""`verl-multiturn index` and `verl-multiturn retrieval-server`: a corpus for the tools `search` and `browse`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from aiohttp import web

from verl_multiturn.cli.ends import refuse
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.http.listener import Listener, address_of, listen, raise_open_files
from verl_multiturn.tools.bm25 import Bm25Index
from verl_multiturn.tools.retrieval_server import build_server

Corpus = Annotated[Path, typer.Option(help="Folder of .txt, .md and .jsonl files.")]
IndexDir = Annotated[Path | None, typer.Option(help="Where indices are kept.")]


def index(corpus: Corpus, index_dir: IndexDir = None) -> None:
    """Build the BM25 index of a corpus, if it is not there yet."""
    print(f"{len(_open(corpus, index_dir))} documents")


def retrieval_server(
    corpus: Corpus,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    index_dir: IndexDir = None,
    top_k: Annotated[
        int, typer.Option(min=1, max=100, help="Documents for each query where a request says nothing.")
    ] = 3,
) -> None:
    """Serve the BM25 index of a corpus to retrieval tools; build it first, if it is not there yet.

    It has no authentication: listen on an address that only the run's nodes reach.
    """
    server = build_server(_open(corpus, index_dir), top_k)
    try:
        listening = listen(host, port, f"--host {host} --port {port}")
    except ConfigError as error:
        refuse(error)
    asyncio.run(_serve(server, listening))


def _open(corpus: Path, index_dir: Path | None) -> Bm25Index:
    try:
        return Bm25Index.open(corpus, index_dir)
    except ConfigError as error:
        refuse(error)


async def _serve(server: web.AppRunner, listening: socket.socket) -> NoReturn:
    """Serve until a signal comes, and end the process."""
    loop = asyncio.get_running_loop()
    came: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, came.put_nowait, each)
    raise_open_files()
    await server.setup()
    assert server.server is not None
    listener = Listener(listening, server.server, make_room=lambda: False)
    print(f"serving on http://{address_of(listening)}; Ctrl-C ends it", flush=True)
    number = await came.get()
    await listener.aclose()
    await server.cleanup()
    os._exit(130 if number == signal.SIGINT else 0)  # a search that is under way may take minutes
