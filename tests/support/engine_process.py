"""A stand-in of SGLang's server as a process of its own, which can be killed: it says one token for ever.

    python -m tests.support.engine_process --port 0 --version HASH --token 7

It prints its address, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio

from tests.support.weights_server import WeightsServer


async def _serve(options: argparse.Namespace) -> None:
    server = WeightsServer(options.token, options.version, lambda _: options.token, options.step_s)
    async with server.serve(options.port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--version", default="a" * 64)
    parser.add_argument("--token", type=int, default=65)
    parser.add_argument("--step-s", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))
