"""Conversations with images for tests: real processors, and a tool that shows pictures."""

from __future__ import annotations

from typing import Any

from tests.support.rollout_config import make_config
from verl_multiturn import Ask, BaseTool, ScriptedEngine, ToolSchema

KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
SCHEMA = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}, "required": []}}}  # fmt: skip  # noqa: E501
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


class LookTool(BaseTool):
    """A tool that gives its answers one after another."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__({}, ToolSchema.read(SCHEMA, "test"))
        self._answers = list(answers)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return self._answers.pop(0)


def picture(side: int, blocks_wide: int, blocks_high: int, seed: int = 0) -> Any:
    """Make a picture of `blocks_wide` by `blocks_high` placeholders."""
    from tests.integration.vision_models import picture as noise

    return noise(side * blocks_wide, side * blocks_high, seed)


class Speaker:
    """An engine whose script can be changed between conversations, because building a runner takes seconds."""

    def __init__(self) -> None:
        self.scripted = ScriptedEngine([])

    async def generate(self, ask: Ask) -> Any:
        return await self.scripted.generate(ask)


runners: dict[tuple[int, int, int], tuple[Any, Speaker]] = {}
"""Runners by the processor's id, the number of tokens and the prompt length."""


def make_runner(processor: Any, kind: str, said: list[str], tokens: int = 400, prompt_length: int = 2048) -> Any:
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel
    from verl_multiturn.verl_bridge.model.processors import image_reader

    key = (id(processor), tokens, prompt_length)
    if key not in runners:
        config = make_config(tokens)
        rollout = config.actor_rollout_ref.rollout
        rollout.multi_turn.max_parallel_calls, rollout.prompt_length = 4, prompt_length
        speaker, read = Speaker(), image_reader(processor, {})
        runners[key] = build_runner(config, LoadedModel(processor.tokenizer, kind, processor, read), speaker), speaker
    runner, speaker = runners[key]
    speaker.scripted = ScriptedEngine([processor.tokenizer.encode(text) for text in said], version=7)
    return runner


async def roll(runner: Any, content: Any, answers: list[Any]) -> tuple[Any, Any, Any]:
    """Run the conversation of one row; return its outcome, the engine's receipts, and verl's form of the outcome."""
    from dataclasses import replace

    from verl_multiturn.verl_bridge.loops.output import to_outputs

    row = {"raw_prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]}
    request = await runner.request({**row, "extra_info": {"index": 5}}, {}, "r")
    outcome, receipts = await runner.run(replace(request, tools={"look": LookTool(answers)}))
    return outcome, receipts, to_outputs(outcome, runner.output_settings, 7)[0]


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def trainer_side(processor: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Compute ids, positions and features with the code of verl's own worker."""
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = object.__new__(AgentLoopWorker)
    worker.processor, worker.tokenizer, worker.mm_processor_kwargs = processor, processor.tokenizer, {}
    ids = torch.tensor([*output.prompt_ids, *output.response_ids])
    features = worker._compute_multi_modal_inputs(output, ids)
    attention = torch.ones_like(ids)
    positions = worker._compute_position_ids(ids.unsqueeze(0), attention.unsqueeze(0), features).squeeze(0)
    return ids, positions, features
