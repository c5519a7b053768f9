"""The real agent-loop worker with a scripted model and a slow tool, for `benchmarks.oversample` and its tests.

Real parts: `MultiTurnWorker`, verl's worker below it, our agent loop, conversation, tools' lifecycle and receipts.
Scripted parts: the model's texts and how long it takes, and how long the tool takes. TransferQueue is a dictionary.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout.replica import TokenOutput

from tests.support.rollout_config import make_config
from verl_multiturn import BaseTool, ToolResponse
from verl_multiturn.verl_bridge.compat import row_store
from verl_multiturn.verl_bridge.loops import agent_loop
from verl_multiturn.verl_bridge.servers.client import RolloutClient
from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker, _VerlWorker

CALL = '<tool_call>\n{"name": "wait", "arguments": {"call": %d}}\n</tool_call><|im_end|>'
LAST = "Done.<|im_end|>"
FILLER = "The tool has to look at this. "

Sample = tuple[int, int]
"""Index of the data row, and number of the sample in its group."""
_sample: ContextVar[Sample] = ContextVar("sample")


class Script:
    """A world of conversations, by sample. Override the methods that a test needs."""

    def __init__(self) -> None:
        self.methods: Counter[tuple[Sample, str]] = Counter()
        """How often each method of the tool ran for each sample."""

    def calls(self, sample: Sample) -> int:
        """Return the number of calls of a conversation."""
        return 1

    def fillers(self, sample: Sample) -> int:
        """Return how often each turn has `FILLER` before its call."""
        return 0

    async def generate(self, sample: Sample, tokens: int) -> None:
        """Take the time of a generation, or raise."""

    async def use_tool(self, sample: Sample, call: int) -> None:
        """Take the time of a call, or raise."""


class WaitTool(BaseTool):
    """A tool that follows the script. `script` is set for the time of a run."""

    script: Script = Script()

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Count."""
        self.script.methods[_sample.get(), "create"] += 1

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Take the time that the script has."""
        self.script.methods[_sample.get(), "execute"] += 1
        await self.script.use_tool(_sample.get(), parameters["call"])
        return ToolResponse("ok")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Count."""
        self.script.methods[_sample.get(), "release"] += 1


class ScriptedClient(RolloutClient):
    """A client whose generations are the script's turns."""

    def __init__(self, script: Script, tokenizer: Any) -> None:
        self._script = script
        self._encode = tokenizer.encode
        self._turns: Counter[str] = Counter()
        self.running = 0
        """Number of generations that run now."""

    async def generate(self, request_id: str, **asked: Any) -> TokenOutput:
        """Return the next turn of the sample that asks."""
        sample, turn = _sample.get(), self._turns[request_id]
        self._turns[request_id] += 1
        said = CALL % turn if turn < self._script.calls(sample) else LAST
        ids = self._encode(FILLER * self._script.fillers(sample) + said)
        self.running += 1
        try:
            await self._script.generate(sample, len(ids))
        finally:
            self.running -= 1
        return TokenOutput(
            token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields={"global_steps": 0}
        )


class ScriptedWorker(MultiTurnWorker):
    """Our worker with a scripted client, outside of Ray.

    Args:
        script: Events of the conversations.
        tokenizer: The quickstart's tokenizer.
        folder: A folder for the tool YAML.
        settings: Settings of the rollout, such as `n` and `over_sample_rate`.
    """

    def __init__(self, script: Script, tokenizer: Any, folder: Path, **settings: Any) -> None:
        config = make_config(20_000)
        self.config, self.tokenizer, self.reward_loop_worker_handles = config, tokenizer, None
        with mock.patch.object(_VerlWorker, "__init__", return_value=None):
            super().__init__(config)
        custom = {"multiturn": {"derived": {"tool_config_path": str(write_tool_yaml(folder))}}}
        settings = {"val_kwargs": {"n": 1}, "custom": custom, **settings}
        OmegaConf.update(self.config, "actor_rollout_ref.rollout", settings)
        self.llm_client = ScriptedClient(script, tokenizer)
        self.processor, self.hf_model_type, self.dataset_cls, self.tools = None, "qwen2", None, []
        self.distillation_enabled = False
        self.rows: dict[str, dict[str, Any]] = {}
        """Columns of the rows that were put into TransferQueue, by key."""
        self.status: dict[str, str] = {}
        """Status of each group, by uid."""
        self._script = script

    async def run_groups(self, rows: Sequence[int], *, validate: bool = False, **prompt: Any) -> None:
        """Run one group for each data row, all at once, until they have ended."""
        with self.connected():
            await asyncio.gather(*(self.run_group(row, validate=validate, **prompt) for row in rows))

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Give the tool its script, and the worker its TransferQueue, while the context lasts."""
        queue = SimpleNamespace(async_kv_put=self._put_status, async_kv_batch_put=self._put_rows)
        with (
            mock.patch.object(agent_loop_tq, "tq", queue),
            mock.patch.object(row_store, "transfer_queue", queue),
            mock.patch.object(WaitTool, "script", self._script),
        ):
            yield

    async def run_group(self, row: int, *, validate: bool = False, **prompt: Any) -> None:
        """Run the group of a data row; its uid is `row<index>`."""
        given = {
            "uid": f"row{row}",
            "index": row,
            "raw_prompt": [{"role": "user", "content": "Use the tool."}],
            "agent_name": agent_loop.AGENT_LOOP,
            "global_steps": 1,
            **prompt,
        }
        await self._run_prompt(given, {}, {"step": 1, "sample_index": row, "rollout_n": 0, "validate": validate})

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
        _sample.set((kwargs["index"], kwargs["session_id"]))
        await super()._run_agent_loop(*args, **kwargs)

    async def _put_status(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.status[key] = tag["status"]

    async def _put_rows(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        for i, key in enumerate(keys):
            self.rows[key] = {name: fields[name][i] for name in ("response_mask", "session_id")}


def kept(rows: Sequence[str]) -> list[Sample]:
    """Return the samples whose rows have these keys, in their order."""
    found = []
    for key in rows:
        uid, session, _ = key.split("_")
        found.append((int(uid.removeprefix("row")), int(session)))
    return found


def write_tool_yaml(folder: Path) -> Path:
    """Write the tool YAML, which JSON is, and return its path."""
    parameters = {"type": "object", "properties": {"call": {"type": "integer"}}, "required": ["call"]}
    function = {"name": "wait", "description": "Wait.", "parameters": parameters}
    schema = {"type": "function", "function": function}
    path = folder / "wait.yaml"
    entry = {"class_name": f"{__name__}.WaitTool", "config": {}, "tool_schema": schema}
    path.write_text(json.dumps({"tools": [entry]}), encoding="utf-8")
    return path
