"""Cost of a turn beside the model, as a conversation grows: our loop and verl's ToolAgentLoop, side by side.

    python -m benchmarks.turn_cost

One conversation at a time runs on a scripted engine. Every turn calls a tool that does nothing, with the same text. The
measured time is that from one answer of the engine to the next question to it: parsing, the tool, rendering,
bookkeeping. The figure at turn N is the median over the ten turns up to it.

Then the same is measured with tools whose schemas take 39 KB. The schemas are in the prompt, and a turn must not pay
for them again. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
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

from tests.support.rollout_config import ANSWER, MESSAGES, MODEL, SCHEMA, large_schemas, make_config
from verl_multiturn import Ask, BaseTool, Generation, Request, ToolResponse, ToolSchema
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel

AT = (8, 64, 512)
LONG = 1000
CALL = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call><|im_end|>'


class Clock:
    """A script of turns that notes when the engine gets a request and when it has answered.

    Args:
        turns: Number of turns.
        said: Ids of every turn but the last.
        last: Ids of the last turn.
    """

    def __init__(self, turns: int, said: list[int], last: list[int]) -> None:
        self._turns, self._said, self._last = turns, said, last
        self.asked: list[float] = []
        self.answered: list[float] = []

    def next_turn(self) -> list[int]:
        """Return the ids of the next turn, and note the times."""
        self.asked.append(time.perf_counter())
        said = self._said if len(self.asked) < self._turns else self._last
        self.answered.append(time.perf_counter())
        return list(said)

    def milliseconds_at(self, turn: int) -> float:
        """Return the median milliseconds between an answer and the next question, over the ten turns up to `turn`."""
        gaps = [after - before for before, after in zip(self.answered, self.asked[1:], strict=False)]
        return 1000 * statistics.median(gaps[max(0, turn - 11) : turn - 1])


class OurEngine:
    """The scripted engine for our loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def generate(self, ask: Ask) -> Generation:
        """Return the next scripted turn."""
        said = self._clock.next_turn()
        return Generation(said, [-0.5] * len(said), [0] * len(said), "stop")


class VerlClient:
    """The scripted client for verl's loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def generate(self, **kwargs: Any) -> TokenOutput:
        """Return the next scripted turn."""
        said = self._clock.next_turn()
        return TokenOutput(token_ids=said, log_probs=[-0.5] * len(said), stop_reason="completed")


class OurTool(BaseTool):
    """A tool of our loop that does nothing."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the same text every time."""
        return ToolResponse(ANSWER)


class VerlTool(VerlBaseTool):
    """A tool of verl's loop that does nothing."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return the same text every time."""
        return VerlToolResponse(text=ANSWER), 0.0, {}


async def run_ours(turns: int, tokenizer: Any, others: Sequence[dict[str, Any]] = ()) -> Clock:
    """Run a conversation in our loop, and return its clock.

    Args:
        turns: Number of turns.
        tokenizer: The quickstart's tokenizer.
        others: Schemas of further tools, which are never called.
    """
    clock = Clock(turns, tokenizer.encode(CALL), tokenizer.encode("Done.<|im_end|>"))
    config = make_config(turns * 200, 2048 + len(json.dumps(others)))
    runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), OurEngine(clock))
    made = [OurTool({}, ToolSchema.read(schema, "benchmark")) for schema in (SCHEMA, *others)]
    outcome = await runner.conversation.run(Request("r", MESSAGES, {tool.name: tool for tool in made}))
    assert outcome.trajectory.turns == turns, outcome
    return clock


async def run_verl(turns: int, tokenizer: Any) -> Clock:
    """Run a conversation in verl's loop, and return its clock."""
    clock = Clock(turns, tokenizer.encode(CALL), tokenizer.encode("Done.<|im_end|>"))
    config = make_config(turns * 200)
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=VerlClient(clock),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
        tools=ToolListWrap([VerlTool({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))]),
    )
    output = await loop.run({}, raw_prompt=MESSAGES)
    assert len(clock.asked) == turns, output.num_turns
    return clock


def schemas_ratio(tokenizer: Any, turns: int = 64, runs: int = 5) -> float:
    """Return how many times as long a turn takes with 39 KB of schemas: the median of several pairs of runs."""

    def milliseconds(others: Sequence[dict[str, Any]]) -> float:
        return asyncio.run(run_ours(turns, tokenizer, others)).milliseconds_at(turns)

    large = large_schemas()
    return statistics.median(milliseconds(large) / milliseconds(()) for _ in range(runs))


def main() -> None:
    """Measure everything, and print the table and the figures."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asyncio.run(run_ours(8, tokenizer))
    asyncio.run(run_verl(8, tokenizer))
    ours = {turn: asyncio.run(run_ours(turn, tokenizer)).milliseconds_at(turn) for turn in AT}
    verl = {turn: asyncio.run(run_verl(turn, tokenizer)).milliseconds_at(turn) for turn in AT}
    long = asyncio.run(run_ours(LONG, tokenizer))
    growth = long.milliseconds_at(LONG) / long.milliseconds_at(10)
    table = Table(
        "turn", "ours, ms", "verl's ToolAgentLoop, ms", "verl / ours", title="what a turn costs beside the model"
    )
    for turn in AT:
        table.add_row(str(turn), f"{ours[turn]:.2f}", f"{verl[turn]:.2f}", f"{verl[turn] / ours[turn]:.1f}")
    console = Console()
    console.print(table)
    console.print(f"ours: turn {LONG} takes {growth:.2f} × as long as turn 10")
    with_schemas = schemas_ratio(tokenizer)
    console.print(f"ours: with 39 KB of tools' schemas a turn takes {with_schemas:.2f} × as long as with one small one")
    result = {
        "ours_ms": {turn: round(ours[turn], 3) for turn in AT},
        "verl_ms": {turn: round(verl[turn], 3) for turn in AT},
        "ratio_at": {turn: round(verl[turn] / ours[turn], 2) for turn in AT},
        "turn_1000_over_turn_10": round(growth, 2),
        "with_39_kb_of_schemas": round(with_schemas, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
