"""A teacher of verl's distillation in this process: a model of transformers behind verl's own client, without servers.

Rows take the way of a run: our worker's questions, verl's method of its worker, verl's client, the servers' answers in
their form, and the columns. `with_columns` puts these into a batch of `training_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.verl_bridge.loops.teacher import teacher_rows
from verl_multiturn.verl_bridge.trainer.distillation import distillation_loss
from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

Rows = Sequence[tuple[list[int], list[int], list[int]]]
_WORDS = 1_000_000
"""A vocabulary that is larger than that of any model here."""
VERLS_WORKER: Any = MultiTurnWorker.__mro__[1]


def teaching(**loss: Any) -> DictConfig:
    """Return verl's configuration of a run with one teacher; `loss` changes its `distillation_loss`."""
    section: Any = OmegaConf.load(str(files(verl) / "trainer/config/distillation/distillation.yaml"))
    del section.defaults
    rollout = {
        "name": "sglang", "dtype": "float32", "temperature": 1.0, "prompt_length": 64, "response_length": 256,
        "agent": {"num_workers": 1}, "custom": {"multiturn": {}},
    }  # fmt: skip
    config = OmegaConf.create({"distillation": section, "actor_rollout_ref": {"rollout": rollout}})
    config.distillation.update({"enabled": True, "nnodes": 1, "n_gpus_per_node": 1})
    config.distillation.distillation_loss.update(loss)
    teacher = config.distillation.teacher_models.teacher_model
    teacher.model_path, teacher.inference.tensor_model_parallel_size = "a teacher", 1
    return config


class ModelClient:
    """verl's client of a teacher's servers: a model answers, as SGLang does."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.asked: list[list[int]] = []

    @torch.no_grad()
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Return the log-probs of a prompt's tokens: entry i is about token i + 1, the last one is zeros."""
        self.asked.append(list(prompt_ids))
        known = self.model(torch.tensor([prompt_ids])).logits[0, :-1].log_softmax(-1)
        if width := sampling_params["prompt_logprobs"]:
            logprobs, ids = known.topk(width)
        else:
            ids = torch.tensor(prompt_ids[1:], dtype=torch.int64).reshape(-1, 1)
            logprobs = known.gather(-1, ids)
        nothing = [0] * max(width, 1)
        told = {"prompt_ids": [*ids.tolist(), nothing], "prompt_logprobs": [*logprobs.tolist(), nothing]}
        return TokenOutput(token_ids=[], extra_fields=told)


def worker_of(config: DictConfig, client: Any) -> Any:
    """Return an agent-loop worker of ours whose teacher has this client."""
    worker = object.__new__(MultiTurnWorker)
    worker.config, worker.distillation_enabled, worker.teacher_key = config, True, "data_source"
    worker.teacher_server_manager = AsyncTeacherLLMServerManager(config, {"default": client})
    return worker


async def ask(worker: Any, rows: Rows) -> list[dict[str, torch.Tensor]]:
    """Return the columns of each row of a conversation, as our worker stores them."""
    outputs = [row_output(prompt, response) for prompt, response, _ in rows]
    questions = teacher_rows(worker.teacher_server_manager, worker.config, Outages(), _WORDS)
    await questions.ask(outputs, partial(worker._ask_teacher, columns={"data_source": "sums"}))
    return [output.extra_fields for output in outputs]


def row_output(prompt: list[int], response: list[int]) -> Any:
    """Return a row as its agent loop has made it, as far as a teacher is concerned."""
    return SimpleNamespace(
        prompt_ids=prompt, response_ids=response, extra_fields={}, multi_modal_data=None, mm_processor_kwargs=None
    )


def with_columns(batch: TensorDict, columns: Sequence[dict[str, torch.Tensor]]) -> TensorDict:
    """Return a batch with its rows' columns of a teacher, and without importance weights.

    verl 0.9.1 raises where it has both and `use_policy_gradient`; the start refuses that.
    """
    del batch["rollout_is_weights"]
    for name in ("teacher_ids", "teacher_logprobs"):
        batch[name] = torch.nested.as_nested_tensor([each[name] for each in columns], layout=torch.jagged)
    return batch


def loss_of(config: DictConfig, verls: Any = distillation_loss, **actor: Any) -> Any:
    """Return a loss of the actor's workers in a run with a teacher; ours, unless another one is given."""
    said = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": False, **actor}
    return partial(verls, config=ActorConfig(**said), distillation_config=omega_conf_to_dataclass(config.distillation))
