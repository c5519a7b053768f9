"""A tensor-parallel rank of `test_spmd`: the real `AsyncSGLangRollout` with a scripted engine in place of SGLang."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from verl import DataProto
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_multiturn import BaseTool, CertificateError, EngineError, ScriptedEngine, ToolResponse
from verl_multiturn.rollout.engines.protocol import Engine
from verl_multiturn.verl_bridge.loops import runner
from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

ROOT = Path(__file__).resolve().parents[2]
CALL = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'


class CountTool(BaseTool):
    """A tool that writes a line for each execution, so that executions in every process are seen."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, Any]:
        descriptor = os.open(os.environ["COUNT_FILE"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, f"{instance_id} {os.getpid()}\n".encode())
        os.close(descriptor)
        return ToolResponse("done"), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 1.0


class ScriptedRollout(AsyncSGLangRollout):
    """The rollout without its server."""

    async def _make_engine(self) -> Engine:
        tokenizer = self.model_config.tokenizer

        def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
            # Two calls in the first turn, one in the second, then an answer that no other process would give.
            text = (f"{CALL}\n{CALL}", CALL, f"Answer: {os.getpid()}")[turn]
            if turn == 2 and "question 3" in tokenizer.decode(ids):
                raise EngineError("gone")
            return list(tokenizer.encode(text + "<|im_end|>"))

        return ScriptedEngine(script, version=5)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = RolloutConfig(
        name="sglang_async",
        tensor_model_parallel_size=2,
        prompt_length=320,
        response_length=256,
        custom={
            "multiturn": {
                "tool_reward": {"mode": "add", "weight": 2.0},
                "record_dir": str(out / "records"),
            }
        },
    )
    object.__setattr__(config.multi_turn, "max_parallel_calls", 2)
    object.__setattr__(config.multi_turn, "tool_config_path", str(out / "tools.yaml"))
    model = HFModelConfig(path=str(ROOT / "recipes" / "quickstart" / "model"))
    rollout = ScriptedRollout(config=config, model_config=model, device_mesh=None)
    rows = np.empty(4, dtype=object)
    rows[:] = [[{"role": "user", "content": f"question {i}"}] for i in range(4)]
    uids = np.array(["u", "v", "u", "u"], dtype=object)
    prompts = DataProto(batch=None, non_tensor_batch={"raw_prompt": rows, "uid": uids}, meta_info={"global_steps": 5})
    batch = rollout.generate_sequences(prompts)
    tensors = dict(batch.batch.items())
    with (out / f"rank{rank}.pkl").open("wb") as file:
        pickle.dump((tensors, {k: list(v) for k, v in batch.non_tensor_batch.items()}), file)

    # An author's mistake on rank 0 must end both ranks instead of hanging one of them.
    broken = np.empty(1, dtype=object)
    broken[:] = [{"need_tools_kwargs": True}]
    bad = DataProto(batch=None, non_tensor_batch={"raw_prompt": rows[:1], "extra_info": broken}, meta_info={})
    try:
        rollout.generate_sequences(bad)
    except ValueError as error:
        (out / f"error{rank}.txt").write_text(str(error))

    # With the mode `replace`, the batch has `rm_scores` and no `turn_rewards`.
    config.custom["multiturn"]["tool_reward"] = {"mode": "replace"}
    (out / f"replaced{rank}.txt").write_text(str(sorted(rollout.generate_sequences(prompts).batch.keys())))

    # A batch that differs from the engine's tokens must end both ranks, too.
    to_outputs = runner.to_outputs

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        outputs = to_outputs(*args, **kwargs)
        outputs[0].response_mask[0] = 0
        return outputs

    runner.to_outputs = spoiled
    try:
        rollout.generate_sequences(prompts)
    except CertificateError as error:
        (out / f"uncertified{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
