"""An endpoint in a process that may open few files.

    python -m tests.servers.small_proxy SOFT HARD LOOP SESSIONS

It prints one line of JSON: its addresses, the keys of its sessions, and its limit. Each session answers "open" if the
process can still open files at a request. Lines on the standard input: `hog` opens all files that remain, `free` closes
them; each is answered by a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys

import uvloop

from tests.proxy_clients import FakeDelivery, FakeSession
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import ChatRequest

_OPENED = 16


class Opening(FakeSession):
    """A session that opens files at a request."""

    def begin(self, request: ChatRequest) -> FakeDelivery:
        opened: list[int] = []
        try:
            for _ in range(_OPENED):
                opened.append(os.open(os.devnull, os.O_RDONLY))
            self.content = "open"
        except OSError as error:
            self.content = str(error)
        for each in opened:
            os.close(each)
        return super().begin(request)


async def serve(sessions: int) -> None:
    """Serve until the standard input is closed."""
    held: list[int] = []
    async with ProxyServer() as server:
        access = [server.open(Opening()) for _ in range(sessions)]
        keys = [each.api_key for each in access]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        print(json.dumps({"base": access[0].anthropic_base_url, "keys": keys, "limit": limit}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "hog":
                try:
                    while True:
                        held.append(os.dup(0))
                except OSError:
                    pass
            else:
                while held:
                    os.close(held.pop())
            print(line.strip(), flush=True)


def main() -> None:
    """Set the limits, and serve."""
    soft, hard, loop, sessions = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    make = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[loop]
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(serve(int(sessions)))


if __name__ == "__main__":
    main()
