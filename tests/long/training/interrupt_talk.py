"""Conversations for `benchmarks.interrupt`: their tool, their parser, and the journal's entries of their tokens.

The model is random, so that it writes no calls. A parser takes each turn for calls until the last one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.long.training.interrupt_engine import SCALES, STOPS, TOKENIZER, Attempt, Engine, conversation
from verl_multiturn import Outcome
from verl_multiturn.chat.parsing.turns import AssistantTurn, ToolCall
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

TURNS = 5
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
GREEDY = {**SAMPLED, "temperature": 0.0}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "wait",
        "description": "Waits.",
        "parameters": {"type": "object", "properties": {"turn": {"type": "integer"}}, "required": ["turn"]},
    },
}


class WaitTool(BaseTool):
    """A tool that sleeps, or waits for `gate`."""

    def __init__(self) -> None:
        super().__init__({}, ToolSchema.model_validate(_SCHEMA))
        self.running = 0
        self.longest_s = 0.3
        self.gate: asyncio.Event | None = None
        self._random = random.Random(0)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return a number that depends on the turn alone."""
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(self._random.uniform(0, self.longest_s))
        finally:
            self.running -= 1
        return ToolResponse(text=str(parameters["turn"] * 7919 % 10_000))


class CallAlways:
    """A parser that takes each turn but the last one for calls: one or two, in turns."""

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """Return the turn, whatever its text is."""
        calls = 0 if turn >= TURNS - 1 else 1 + turn % 2
        return AssistantTurn("", [ToolCall("wait", f'{{"turn": {turn}}}', f"call_{turn}_{i}") for i in range(calls)])


class Talk:
    """Conversations over an engine.

    Args:
        engine: The engine.
        custom: Settings under `custom.multiturn`.
    """

    def __init__(self, engine: Engine, **custom: Any) -> None:
        from omegaconf import OmegaConf
        from transformers import AutoTokenizer

        from verl_multiturn.verl_bridge.loops import runner
        from verl_multiturn.verl_bridge.model.loading import LoadedModel
        from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

        self.engine = engine
        self.tool = WaitTool()
        self.outcomes: dict[str, Outcome] = {}
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        ours = {"actor_rollout_ref": {"rollout": {"custom": {"multiturn": custom}}}}
        config, model = OmegaConf.merge(engine.config, ours), LoadedModel(tokenizer, "qwen2")
        with mock.patch.object(runner, "make_parser", return_value=CallAlways()):
            self.runner = runner.build_runner(config, model, VerlEngine(engine.client.generate))
        self.runner.tools["wait"] = self.tool
        self._ends: dict[str, set[int]] = {}
        self.stop_ids = random.Random(0).sample(range(100, len(tokenizer)), STOPS)

    async def run(self, name: str, question: str, sampling: dict[str, Any], *, stops: bool = True) -> Outcome:
        """Roll a conversation out, and keep its outcome.

        Args:
            name: Name of the conversation, not used before.
            question: The user's message.
            sampling: `SAMPLED` or `GREEDY`.
            stops: Whether turns end at the stop tokens; if not, only a length ends them.
        """
        conversation.set(name)
        row = {"raw_prompt": [{"role": "user", "content": question}]}
        params = self.runner.sampling({**sampling, "stop_token_ids": self.stop_ids})
        if not stops:
            params = {**params, "ignore_eos": True}
            del params["stop_token_ids"]
        self._ends[name] = set(params.get("stop_token_ids", ()))
        request = await self.runner.request(row, params, name)
        self.outcomes[name], _ = await self.runner.run(request)
        return self.outcomes[name]

    def went_on(self, name: str) -> bool:
        """Return whether a turn of a conversation goes on after a token that ends turns."""
        trajectory, ends = self.outcomes[name].trajectory, self._ends[name]
        return any(
            trained and following and id_ in ends
            for id_, trained, following in zip(trajectory.ids, trajectory.mask, trajectory.mask[1:], strict=False)
        )


def differences(outcome: Outcome, attempts: Sequence[Attempt]) -> list[str]:
    """Return how a trajectory differs from the journal, in words; empty if it does not."""
    trajectory, found, at = outcome.trajectory, [], outcome.trajectory.prompt_length
    for attempt in attempts:
        # An attempt goes on at the trajectory's end: after a turn, or after the tokens of an attempt before it.
        start, count = len(attempt.prompt), len(attempt.ids)
        if trajectory.ids[:start] != attempt.prompt or start < at:
            found.append("an attempt was asked to go on after other tokens than the trajectory has")
            continue
        if any(trajectory.mask[at:start]):
            found.append("tokens are trained that no attempt returned")
        at = start + count
        # The weights of an attempt during which they changed are not known.
        version = attempt.version if attempt.version == attempt.last_version else NO_VERSION
        columns: dict[str, tuple[list[Any], list[Any]]] = {
            "ids": (trajectory.ids, attempt.ids),
            "logprobs": (trajectory.logprobs, attempt.logprobs),
            "versions": (trajectory.versions, [version] * count),
            "mask": (trajectory.mask, [1] * count),
        }
        found += [name for name, (have, said) in columns.items() if have[start:at] != said]
    if any(trajectory.mask[at:]):
        found.append("tokens are trained that no attempt returned")
    return found


def unlike_their_version(outcome: Outcome, model: Any) -> int:
    """Return how many sampled tokens have another log-probability than the weights of their version give them.

    Args:
        outcome: The outcome.
        model: The model of version 0, which multiplies its logits by 1.
    """
    import torch

    trajectory = outcome.trajectory
    with torch.no_grad():
        logits = model(torch.tensor([trajectory.ids])).logits[0]
    places = [at for at, trained in enumerate(trajectory.mask) if trained and trajectory.versions[at] != NO_VERSION]
    scales = torch.tensor([SCALES[trajectory.versions[at] % len(SCALES)] for at in places])
    logprobs = torch.log_softmax(logits[[at - 1 for at in places]] * scales[:, None], dim=-1)
    expected = logprobs[range(len(places)), [trajectory.ids[at] for at in places]]
    said = torch.tensor([trajectory.logprobs[at] for at in places])
    return int(((said - expected).abs() > 1e-3).sum())
