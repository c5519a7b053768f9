"""Cost of the tools' runtime: no-op calls, a turn with four calls, and the sandbox.

    python -m benchmarks.tool_speed

- No-op: 5,000 calls of a tool that yields once and returns, 512 in flight, through `ToolSession.execute`. For
  comparison asyncio alone does only the necessary part: it reads the arguments' JSON, and makes a task with a deadline
  for each call. Our runtime also checks the arguments against the schema, takes a slot, and reads the answer. The
  figures are processor time, so that other work on the machine does not count, and medians over rounds that alternate
  between the two.
- Parallel turn: one turn with four calls of 100 ms each, from the model's answer to the next question to it, in our
  loop and in verl's ToolAgentLoop (with its default and with `max_parallel_calls=4`). The benchmark also counts how
  many of the four answers the model got to read, in order.
- Sandbox: `benchmarks.sandbox_speed`.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool as VerlBaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.schemas import ToolResponse as VerlToolResponse
from verl.workers.rollout.replica import TokenOutput

from benchmarks import sandbox_speed
from tests.support.rollout_config import MESSAGES, MODEL, make_config
from verl_multiturn import Ask, BaseTool, Generation, Request, ToolResponse, ToolSchema
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel

CALLS = 5000
IN_FLIGHT = 512
ROUNDS = 9
TURNS = 5
SLEEP_S = 0.1
ARGUMENTS = '{"key": "value"}'
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
FUNCTION = {"name": "noop", "description": "Nothing.", "parameters": PARAMETERS}
SCHEMA = ToolSchema.read({"type": "function", "function": FUNCTION}, "benchmark")


class Noop(BaseTool):
    """A tool that yields once and returns."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Yield once, and answer "ok"."""
        await asyncio.sleep(0)
        return ToolResponse("ok")


async def in_flight(call: Callable[[int], Coroutine[Any, Any, Any]]) -> float:
    """Return the processor seconds of `CALLS` calls, `IN_FLIGHT` at once."""

    async def caller(number: int) -> None:
        for _ in range(CALLS // IN_FLIGHT + (number < CALLS % IN_FLIGHT)):
            await call(number)

    started = time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(IN_FLIGHT):
            group.create_task(caller(number))
    return time.process_time() - started


async def noop_seconds() -> tuple[float, float]:
    """Return the median processor seconds of our runtime and of asyncio alone."""
    tool = Noop({}, SCHEMA)
    gates = Gates(Gate, 60)
    sessions = [ToolSession(f"r{number}", {"noop": tool}, {}, gates, 1) for number in range(IN_FLIGHT)]
    calls = [ToolCall("noop", ARGUMENTS, "c")]

    async def ours(number: int) -> None:
        await sessions[number].execute(calls)

    async def bare(number: int) -> None:
        await asyncio.wait_for(asyncio.create_task(tool.execute("r", json.loads(ARGUMENTS))), 60)

    for session in sessions:
        await session.__aenter__()
    # A garbage collection over all objects of torch and transformers takes longer than the calls, and hits either at
    # random.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(ROUNDS):
        seconds["ours"].append(await in_flight(ours))
        seconds["bare"].append(await in_flight(bare))
    for session in sessions:
        await session.__aexit__(None, None, None)
    return statistics.median(seconds["ours"]), statistics.median(seconds["bare"])


class Model:
    """A scripted model that makes four calls in its first turn.

    It notes when it answered and was called again, and its input. The subclasses serve our loop and verl's.
    """

    def __init__(self, tokenizer: Any) -> None:
        calls = (f'<tool_call>\n{{"name": "noop", "arguments": {{"key": "{i}"}}}}\n</tool_call>' for i in range(4))
        self._said = [tokenizer.encode("\n".join(calls) + "<|im_end|>"), tokenizer.encode("Done.<|im_end|>")]
        self._tokenizer = tokenizer
        self._asked = 0
        self._answered = 0.0
        self.turn_s = 0.0
        self.read = ""

    def _turn(self, ids: Sequence[int]) -> list[int]:
        if self._asked:
            self.turn_s = time.perf_counter() - self._answered
            self.read = self._tokenizer.decode(ids)
        said = self._said[self._asked]
        self._asked += 1
        self._answered = time.perf_counter()
        return said

    def answers_in_order(self) -> int:
        """Return how many of the four answers the model read; 0 when they were not in order."""
        at = [self.read.find(f"answer {i}") for i in range(4)]
        found = [place for place in at if place >= 0]
        return len(found) if found == sorted(found) else 0


class OurModel(Model):
    """The scripted model as an engine of our loop."""

    async def generate(self, ask: Ask) -> Generation:
        """Return the next scripted turn."""
        said = self._turn(ask.ids)
        return Generation(said, [-0.5] * len(said), [0] * len(said), "stop")


class VerlModel(Model):
    """The scripted model as a server manager of verl's loop."""

    async def generate(self, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        """Return the next scripted turn."""
        said = self._turn(prompt_ids)
        return TokenOutput(token_ids=said, log_probs=[-0.5] * len(said), stop_reason="completed")


class OurSleep(BaseTool):
    """A tool of our loop that takes 100 ms."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Sleep, then answer with the key."""
        await asyncio.sleep(SLEEP_S)
        return ToolResponse(f"answer {parameters['key']}")


class VerlSleep(VerlBaseTool):
    """A tool of verl's loop that takes 100 ms."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Sleep, then answer with the key."""
        await asyncio.sleep(SLEEP_S)
        return VerlToolResponse(text=f"answer {parameters['key']}"), 0.0, {}


async def our_turn(tokenizer: Any) -> Model:
    """Run a conversation with four parallel calls in our loop."""
    config = make_config(2000)
    config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls = 4
    model = OurModel(tokenizer)
    runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), model)
    await runner.conversation.run(Request("r", MESSAGES, {"noop": OurSleep({}, SCHEMA)}))
    return model


async def verl_turn(tokenizer: Any, parallel: int) -> Model:
    """Run the same conversation in verl's ToolAgentLoop, with `max_parallel_calls=parallel`."""
    config = make_config(2000)
    config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls = parallel
    model = VerlModel(tokenizer)
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=model,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
        tools=ToolListWrap([VerlSleep({}, OpenAIFunctionToolSchema.model_validate(SCHEMA.as_dict()))]),
    )
    await loop.run({}, raw_prompt=MESSAGES)
    return model


async def median_turn(play: Callable[[], Coroutine[Any, Any, Model]]) -> tuple[float, int]:
    """Repeat a conversation, and summarize its turn with tools; the first, cold run does not count.

    Returns:
        The median milliseconds from answer to next question, and the fewest answers that a model read.
    """
    models = [await play() for _ in range(TURNS + 1)][1:]
    return 1000 * statistics.median(model.turn_s for model in models), min(m.answers_in_order() for m in models)


async def measure() -> dict[str, Any]:
    """Measure all figures except the sandbox's, and print their table."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ours_s, bare_s = await noop_seconds()
    ours_ms, ours_answers = await median_turn(lambda: our_turn(tokenizer))
    default_ms, default_answers = await median_turn(lambda: verl_turn(tokenizer, 1))
    verl_ms, verl_answers = await median_turn(lambda: verl_turn(tokenizer, 4))
    table = Table("", "ours", "beside it", title="tools: what the runtime costs")
    table.add_row(
        f"no-op call, {IN_FLIGHT} in flight", f"{1e6 * ours_s / CALLS:.1f} µs", f"{1e6 * bare_s / CALLS:.1f} µs asyncio"
    )
    table.add_row("4 calls of 100 ms", f"{ours_ms:.1f} ms, {ours_answers} answers", "")
    table.add_row("", "", f"{default_ms:.1f} ms, {default_answers} answers: verl, default")
    table.add_row("", "", f"{verl_ms:.1f} ms, {verl_answers} answers: verl, max_parallel_calls=4")
    Console().print(table)
    return {
        "noop_ratio": round(ours_s / bare_s, 2),
        "parallel_turn_ms": round(ours_ms, 1),
        "parallel_answers": ours_answers,
        "verl_parallel_turn_ms": {"default": round(default_ms, 1), "4": round(verl_ms, 1)},
        "verl_parallel_answers": {"default": default_answers, "4": verl_answers},
    }


def main() -> None:
    """Measure everything, and print the figures."""
    figures = asyncio.run(measure())
    sandbox = sandbox_speed.measure()
    print(json.dumps({key: sandbox[key] for key in ("sandbox_p50_ms", "sandbox_calls_per_s")} | figures))


if __name__ == "__main__":
    main()
