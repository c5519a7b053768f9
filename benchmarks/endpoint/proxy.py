"""Costs of the endpoint beside the model: seconds of a turn, requests a second, and how long it blocks the event loop.

    python -m benchmarks.proxy [--sessions N] [--turns N]

Agents in a process of their own speak HTTP to the server of a worker. The engine is scripted and answers at once with a
tool call, so that they wait for the overhead alone: HTTP, reading, matching, rendering with Qwen3's own template and
tokenizer, reading the calls, receipts, writing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.loop_watch import LoopWatch
from benchmarks.proxy_client import Plan
from tests.support.rollout_config import SCHEMA, large_schemas
from tests.support.template_play import template_of
from verl_multiturn import Ask, Generation
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits, StopReason

CALL = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call><|im_end|>'
ANSWER = "The answer of the tool, always the same, some twenty words long, so that each turn adds as much as the last."
WORDS = ("water", "river", "stone", "bridge", "letter", "garden", "window", "winter", "market", "silver")
AT = (8, 256)
_FAR = 10_000_000


class InstantEngine:
    """An engine that gives the same answer in every turn.

    Args:
        said: Ids of the turn.
        seconds: The most seconds that a turn takes; they are drawn.
    """

    def __init__(self, said: list[int], seconds: float = 0.0) -> None:
        self._said = said
        self._seconds = seconds
        self._random = random.Random(0)

    async def generate(self, ask: Ask) -> Generation:
        """Return the turn."""
        if self._seconds:
            await asyncio.sleep(self._random.random() * self._seconds)
        return Generation(list(self._said), [-0.5] * len(self._said), [0] * len(self._said), "stop")


@dataclass(frozen=True)
class Played:
    """Measurements of one round of sessions."""

    taken: list[list[float]]
    """Seconds of each request of each session."""
    seconds: float
    """Of the whole round."""
    cpu_s: float
    """Processor time of the server's process."""
    loop: LoopWatch

    def milliseconds(self, turns: range | None = None) -> float:
        """Return the median of the requests with these numbers, counted from 0; of all by default."""
        chosen = [own[turn] for own in self.taken for turn in (turns or range(len(own)))]
        return 1000 * statistics.median(chosen)


def make_run(seconds: float = 0.0) -> ProxyRun:
    """Make the shared parts of sessions: Qwen3's template and tokenizer, and an engine that takes at most `seconds`."""
    template = template_of("qwen3")
    engine = InstantEngine(template.tokenizer.encode(CALL), seconds)
    return ProxyRun(
        engine=ReceiptingEngine(StopTexts(engine, template.tokenizer)),
        renderer=PromptRenderer(template.codec, template.end_ids),
        reader=TurnReader(template.parser, template.tokenizer, template.end_ids, [THINK]),
        limits=Limits(prompt_length=_FAR, response_length=_FAR),
        fill_id=template.end_ids[0],
    )


def prompt_of(tokens: int, tools: Sequence[dict[str, Any]]) -> str:
    """Make a text with which a first prompt has about `tokens` tokens."""
    template = template_of("qwen3")
    drawn = random.Random(0)
    without = len(template.codec.initial([{"role": "user", "content": ""}], list(tools)))
    words = [drawn.choice(WORDS) for _ in range(max(1, tokens - without))]
    encoded = template.tokenizer.encode(" ".join(words), add_special_tokens=False)
    return str(template.tokenizer.decode(encoded[: max(1, tokens - without)]))


async def play(
    sessions: int, turns: int, tokens: int, large: bool = False, at_once: int = 1, engine_s: float = 0.0
) -> Played:
    """Play sessions of agents, and measure.

    Args:
        sessions: Number of sessions.
        turns: Requests of each.
        tokens: Tokens of the first prompt, tools included.
        large: Whether the tools' schemas take 39 KB.
        at_once: Sessions at the same time.
        engine_s: The most seconds that the engine takes for a turn.
    """
    tools = [SCHEMA, *(large_schemas() if large else ())]
    run = make_run(engine_s)
    open_sessions = [AgentSession(f"s{number}", run, {}) for number in range(sessions)]
    async with ProxyServer() as server:
        addresses = [server.open(session) for session in open_sessions]
        port = int(server.address.rpartition(":")[2])
        keys = [address.api_key for address in addresses]
        plan = Plan(port, keys, at_once, turns, prompt_of(tokens, tools), tools, ANSWER, engine_s)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.proxy_client", stdin=-1, stdout=-1
        )
        before, cpu = time.perf_counter(), time.process_time()
        async with LoopWatch() as loop:
            written, _ = await client.communicate(json.dumps(asdict(plan)).encode())
        seconds, cpu_s = time.perf_counter() - before, time.process_time() - cpu
    if client.returncode:
        raise RuntimeError("the clients failed")
    for session in open_sessions:
        session.end()
        await session.closed()
        outcome = session.outcome(StopReason.FINISHED)
        assert outcome.places == [0] * turns, (len(session.forest.roots), outcome.places)
        session.forget()
    run.renderer.close()
    return Played(json.loads(written), seconds, cpu_s, loop)


async def measure(sessions: int, turns: int) -> dict[str, Any]:
    """Measure everything, and print the table.

    Args:
        sessions: Sessions at once, where many are.
        turns: Requests of each of them.
    """
    few = max(2, sessions // 16)
    await play(2, 2, 1000)
    gc.freeze()  # as the agent loop does
    small = await play(few, 2 * turns, 1000)
    large = await play(few, 2 * turns, 17_000, large=True)
    long = await play(few, AT[1] + 4, 1000)
    by_turn = {turn: long.milliseconds(range(turn - 4, turn + 4)) for turn in AT}
    many = await play(sessions, turns, 1000, at_once=sessions)
    paced = await play(sessions, turns, 1000, at_once=sessions, engine_s=sessions / 150)
    rendered = await play(max(2, sessions // 4), turns, 17_000, large=True, at_once=sessions, engine_s=sessions / 150)
    loops = [paced.loop, rendered.loop]
    requests = sessions * turns
    result = {
        "requests_per_s": round(requests / many.seconds),
        "requests_per_cpu_s": round(requests / many.cpu_s),
        "p50_ms": round(small.milliseconds(), 2),
        "p50_large_ms": round(large.milliseconds(), 2),
        "p50_at_ms": {turn: round(milliseconds, 2) for turn, milliseconds in by_turn.items()},
        "loop_max_ms": round(max(loop.late_ms for loop in loops), 1),
        "step_max_ms": round(max(loop.step_ms for loop in loops), 1),
    }
    table = Table("measure", "value", title=f"{sessions} sessions, scripted engine, Qwen3")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)
    return result


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=128, help="sessions at once")
    parser.add_argument("--turns", type=int, default=16, help="requests of each")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.sessions, given.turns))))


if __name__ == "__main__":
    main()
