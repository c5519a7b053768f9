"""A gateway as a process of its own, which can be killed: the class `Gateway` on an engine without a model.

    python -m tests.support.gateway_process FOLDER [--engine URL] [--port P] [--most N] [--idle-s S] [--seed N]

It prints its address when it listens; SIGTERM ends it in order. Without `--engine` the engine is in the process, and
says the last words of its prompt, so that an answer shows what its session knows. With it, it is `DeployedEngine`
before a stand-in of SGLang (`tests.support.engine_process`).

SIGUSR1 is a failure of power in the writer: at an fsync that `--seed` draws the process is killed, and of what no fsync
took a drawn part is cut off. `--fault` puts a fault into the gateway, for the controls.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

from tests.agent_sessions import make_run
from tests.support.gateway_faults import FAULTS, put_in
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.gateway.files import GatewaySettings
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

ADMIN = "admin-key"
WEIGHTS = "a" * 64
_ECHO = 1000
"""The most tokens of a prompt that the echo says."""
_SYNCS = 12
"""One of so many is the last one after SIGUSR1."""


class Echo:
    """An engine that says the end of its prompt."""

    def __init__(self) -> None:
        self.models = [WEIGHTS]
        tokenizer = tiny_tokenizer()
        self._special, self._end = set(tokenizer.added_tokens_decoder), tokenizer.eos_token_id

    async def look(self) -> str:
        """Return "": it can serve."""
        return ""

    async def generate(self, ask: Ask) -> Generation:
        """Return the last tokens of the prompt that are no control tokens."""
        ids = [each for each in ask.ids if each not in self._special][-_ECHO:]
        ids = [*ids, self._end][-ask.max_new_tokens :]
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop" if ids[-1] == self._end else "length")


class PowerFailure:
    """Ends the process at an fsync, as a failure of power does: what no fsync took is gone, or torn.

    Args:
        folder: Files of the records.
        seed: Draws the fsync, whether it is still done, and how much is left of what none took.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._drawn = folder, random.Random(seed)
        self._left: int | None = None
        self._lock = threading.Lock()  # it stays locked at the end, so that nothing is promised any more
        self._sizes = {path: path.stat().st_size for path in self._files()}
        """Bytes of each file that an fsync took."""
        self._sync = os.fsync
        os.fsync = self.sync

    def begin(self) -> None:
        """Draw the fsync at which the process ends; called once."""
        self._left = self._drawn.randrange(_SYNCS)

    def sync(self, handle: Any) -> None:
        """Do as `os.fsync`; the last time end the process."""
        with self._lock:
            is_last = self._left == 0
            if self._left:
                self._left -= 1
            if is_last and self._drawn.random() < 0.5:
                self._end()
            size = os.fstat(handle).st_size
            self._sync(handle)
            self._sizes[Path(os.readlink(f"/proc/self/fd/{handle}"))] = size
            if is_last:
                self._end()

    def _files(self) -> list[Path]:
        return [path for path in self._folder.resolve().glob("*.jsonl*") if path.is_file()]

    def _end(self) -> None:
        for path in self._files():
            taken, there = self._sizes.get(path, 0), path.stat().st_size
            os.truncate(path, taken + int(self._drawn.random() * max(0, there - taken)))
        os.kill(os.getpid(), signal.SIGKILL)


async def _serve(options: argparse.Namespace, failure: PowerFailure) -> None:
    engine = DeployedEngine(options.engine, WEIGHTS) if options.engine else Echo()
    settings = GatewaySettings(most=options.most, idle_s=options.idle_s)
    run = make_run(engine, response_length=options.tokens, prompt_length=options.tokens)
    gateway = Gateway(run, engine, options.folder, settings, ADMIN, port=options.port)
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_signal_handler(signal.SIGUSR1, failure.begin)
    await gateway.start()
    print(gateway.address, flush=True)
    await over.wait()
    await gateway.aclose()
    if isinstance(engine, DeployedEngine):
        await engine.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    parser.add_argument("--tokens", type=int, default=4096, help="the most of a prompt, and after it")
    parser.add_argument("--seed", type=int, default=0, help="draws the fsync at which SIGUSR1 ends it")
    parser.add_argument("--fault", choices=sorted(FAULTS))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    given.folder.mkdir(parents=True, exist_ok=True)
    put_in(given.fault)
    asyncio.run(_serve(given, PowerFailure(given.folder, given.seed)))
