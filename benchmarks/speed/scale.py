"""Many conversations at once, and very many one after another: the cost of one, and the memory that it leaves behind.

    python -m benchmarks.scale [--short] [--python-gc]

Our agent loop runs as verl's worker runs it, with records, on a `ScriptedEngine`: 6 turns, and a tool that answers at
once. Every turn of the engine lets the others go on, so that all conversations are under way together, as those of a
step are. The cost of one must not depend on how many there are. `--python-gc` has Python's own threshold of its garbage
collection in the place of the worker's, for comparison.

Then 20,000 conversations run, 512 at once, and 5,000 sessions of agents behind the endpoint, 64 at once, each with 3
requests by HTTP. The memory of the process must not grow with them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

from tests.support.rollout_config import ANSWER, MESSAGES, MODEL, SCHEMA, make_config
from verl_multiturn import Ask, BaseTool, Generation, ScriptedEngine, ToolResponse, ToolSchema
from verl_multiturn.calls.closing import close_all
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.records.write.run_file import new_start
from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop, shared_runner
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput
from verl_multiturn.verl_bridge.loops.proxy_loop import ProxyAgentLoop, build_run
from verl_multiturn.verl_bridge.loops.runner import Runner

TURNS, REQUESTS = 6, 3
AT_ONCE = (64, 512, 2048, 8192)
CONVERSATIONS, SESSIONS, FIRST = 20_000, 5_000, 2_000
_CALL = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call><|im_end|>'
_PYTHONS = 700
_LAST = "Done.<|im_end|>"


class Script(ScriptedEngine):
    """A scripted engine that calls the tool in all turns but the last, and remembers nothing of its requests."""

    def __init__(self, tokenizer: Any) -> None:
        said, done = tokenizer.encode(_CALL), tokenizer.encode(_LAST)
        end, asked = done[-1], len(MESSAGES)

        def script(_: str, ids: Sequence[int], __: int) -> list[int]:
            answered = (ids.count(end) - asked) // 2  # a turn, and the message of its tool
            return done if answered == TURNS - 1 else said

        super().__init__(script)

    async def generate(self, ask: Ask) -> Generation:
        """Return the next turn, when all others have gone on."""
        await asyncio.sleep(0)
        made = await super().generate(ask)
        for kept in (self.seen, self.images, self._turns):
            kept.clear()
        return made


class Client:
    """verl's client of the servers, in front of a scripted engine."""

    def __init__(self, engine: Script) -> None:
        self._engine = engine

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any]) -> TokenOutput:
        """Return the next turn in verl's form."""
        made = await self._engine.generate(Ask(request_id, prompt_ids, sampling_params, 1000))
        return TokenOutput(
            token_ids=made.ids, log_probs=made.logprobs, stop_reason="completed", extra_fields={"global_steps": 0}
        )


class Instant(BaseTool):
    """A tool that answers at once."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the same text every time."""
        return ToolResponse(ANSWER)


class Caller:
    """Runs agents that ask the endpoint `REQUESTS` times, each time with the conversation so far."""

    stuck = 0

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(trust_env=False, timeout=600)

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run one agent, and return that it has returned."""
        messages: list[dict[str, Any]] = list(MESSAGES)
        for _ in range(REQUESTS):
            answer = await self._client.post(
                f"{address.base_url}/chat/completions",
                headers={"authorization": f"Bearer {address.api_key}"},
                json={"model": "m", "tools": [SCHEMA], "messages": messages},
            )
            said = answer.raise_for_status().json()["choices"][0]["message"]
            calls = said["tool_calls"]
            messages += [said, *({"role": "tool", "tool_call_id": call["id"], "content": ANSWER} for call in calls)]
        if returned is not None:
            returned()
        return AgentEnd("returned")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class World:
    """One agent-loop worker: the parts that its conversations and sessions share.

    Args:
        records: Folder of the records.
    """

    def __init__(self, records: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._config = make_config(2000)
        rollout = self._config.actor_rollout_ref.rollout
        settings = {"record_dir": str(records), "derived": {"record_start": new_start()}}
        OmegaConf.update(rollout, "custom", {"multiturn": settings}, force_add=True)
        self._trainer = SimpleNamespace(config=self._config)
        self._client = Client(Script(self._tokenizer))
        self.runner: Runner = shared_runner(self._config, self._client, self._tokenizer, "qwen2", dataset_cls=None)
        self.runner.tools["noop"] = Instant({}, ToolSchema.read(SCHEMA, "benchmark"))
        run = build_run(self.runner)
        self.endpoint = ProxyAgentLoop._endpoints[self._client] = Endpoint(run, Caller(), ProxyServer(), 600.0)
        self._begun = 0

    def _row(self) -> dict[str, Any]:
        self._begun += 1
        return {
            "raw_prompt": MESSAGES,
            "uid": f"u{self._begun}",
            "session_id": 0,
            "index": self._begun,
            "global_steps": 1,
        }

    async def converse(self) -> None:
        """Roll one conversation out, and write its row in the form in which it is stored."""
        loop = MultiTurnAgentLoop(self._trainer, self._client, self._tokenizer, "qwen2", dataset_cls=None)
        output = await loop.run({"temperature": 1.0}, **self._row())
        assert isinstance(output, CertifiedOutput)
        assert len(output.stats["turns"]) == TURNS, output.extra_fields["stop_reason"]
        output.as_dict()

    async def serve(self) -> None:
        """Run one session of an agent, and write its row in the form in which it is stored."""
        loop = ProxyAgentLoop(self._trainer, self._client, self._tokenizer, "qwen2", dataset_cls=None)
        output = await loop.run({"temperature": 1.0}, **self._row())
        assert isinstance(output, CertifiedOutput)
        assert len(output.stats["turns"]) == REQUESTS, output.extra_fields["stop_reason"]
        output.as_dict()


async def many(one: Callable[[], Awaitable[None]], count: int, at_once: int) -> None:
    """Run something often, with so many at once; a new one begins when one has ended."""
    left = iter(range(count))

    async def again() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(again() for _ in range(min(count, at_once))))


class Collections:
    """The CPU seconds that Python's garbage collection takes while the context lasts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._since = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._since


async def per_cpu_second(world: World, at_once: int, least: int) -> tuple[float, float]:
    """Return the conversations in a CPU second, of so many at once, and the share of it that collections take.

    Args:
        world: The worker.
        at_once: How many run at once.
        least: How many run in all, at least.
    """
    gc.collect()
    rounds = max(1, least // at_once)
    before = time.process_time()
    with Collections() as collections:
        for _ in range(rounds):
            await asyncio.gather(*(world.converse() for _ in range(at_once)))
    seconds = time.process_time() - before
    return round(rounds * at_once / seconds, 1), round(collections.seconds / seconds, 3)


async def growth(one: Callable[[], Awaitable[None]], count: int, first: int, at_once: int) -> dict[str, float]:
    """Return the MB of this process after the first, and by how much it has grown after all."""
    await many(one, first, at_once)
    gc.collect()
    before = resident_mb()
    await many(one, count - first, at_once)
    gc.collect()
    return {"mb": round(before, 1), "grown_mb": round(resident_mb() - before, 1)}


def resident_mb() -> float:
    """Return the resident memory of this process, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000


async def measure(short: bool, pythons: bool = False) -> dict[str, Any]:
    """Measure everything, and print the table.

    Args:
        short: Whether the numbers are a hundredth of the usual ones.
        pythons: Whether the garbage collection has Python's own threshold.
    """
    part = 100 if short else 1
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        if pythons:
            gc.set_threshold(_PYTHONS, *gc.get_threshold()[1:])
        await many(world.converse, 64, 64)
        sizes = AT_ONCE[:2] if short else AT_ONCE
        found = {size: await per_cpu_second(world, size, AT_ONCE[2] // part) for size in sizes}
        speeds = {size: speed for size, (speed, _) in found.items()}
        result = {
            "per_cpu_s": speeds,
            "gc_share": {size: share for size, (_, share) in found.items()},
            "slowest_over_fastest": round(min(speeds.values()) / max(speeds.values()), 3),
            "conversations": await growth(world.converse, CONVERSATIONS // part, FIRST // part, 512 // part + 1),
            "sessions": await growth(world.serve, SESSIONS // part, FIRST // part, 64 // part + 1),
        }
        await world.endpoint.aclose()
        if world.runner.records is not None:
            await close_all([world.runner.records])
    table = Table("measure", "value", title=f"{TURNS} turns, a tool that answers at once, scripted engine, records")
    for name, value in result.items():
        table.add_row(name, json.dumps(value))
    Console().print(table)
    return result


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a hundredth of the conversations, for a test")
    parser.add_argument("--python-gc", action="store_true", help="with Python's own threshold of its collections")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.short, given.python_gc))))


if __name__ == "__main__":
    main()
