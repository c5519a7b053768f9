"""`AsyncSGLangRollout`: the class that `rollout.name=sglang_async` puts on every training worker.

It is verl's own SGLang adapter, which sends weights to the engine and turns its memory on and off. We add
`generate_sequences` for SPMD callers: tensor-parallel rank 0 of a replica runs the conversations and the tools, and
every rank returns the same batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from ray.exceptions import RayActorError
from tensordict import TensorDict
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from verl import DataProto
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_multiturn.certificate.check import CertificateRow, Violation, verify
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.describe import describe
from verl_multiturn.errors import CertificateError, ConfigError, EngineError
from verl_multiturn.rollout.engines.protocol import Engine
from verl_multiturn.rollout.outcome import Request
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.loops.life import follow
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import takes_images
from verl_multiturn.verl_bridge.names import AGENT_LOOP
from verl_multiturn.verl_bridge.servers.server_loss import EngineOfServer
from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine
from verl_multiturn.verl_bridge.settings import settings_of


class AsyncSGLangRollout(ServerAdapter):
    """verl's SGLang rollout with multi-turn generation for a batch."""

    device_mesh: Any
    _engine: Any
    _runner: Runner | None = None
    _loop: asyncio.Runner | None = None
    """One event loop for all batches, since tools may keep connections that belong to their loop."""

    _had_server = False

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Send new weights as verl does; go through all of them, and send nothing, where the server has died."""
        with contextlib.suppress(RayActorError):  # of the last call, which sends the server its version
            await super().update_weights(*args, **kwargs)

    async def _init_server_adapter(self) -> None:
        known = self._engine
        try:
            await super()._init_server_adapter()
        except (RayActorError, ValueError):
            if not self._had_server:
                raise
            self._engine = EngineOfServer(None, None)  # the server has died again, before it had any weights
            return
        if self._engine is not known:
            self._engine = EngineOfServer(self._engine, self.server_actor)
            self._had_server = True

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Roll a batch out; every tensor-parallel rank of the replica calls this with the same batch.

        Args:
            prompts: `non_tensor_batch` holds verl's row fields (`raw_prompt`, `tools_kwargs`, `extra_info`, `uid`);
                `meta_info` may hold `sampling_params`, `validate`, `global_steps`, and in the first batch
                `apply_chat_template_kwargs`.

        Returns:
            The same batch on every rank. B is the number of rows; P and R are the configured prompt and response
            lengths in tokens.
            - `(B, P)`, padded on the left: `prompts`;
            - `(B, R)`, padded on the right: `responses`, `response_mask`, `rollout_log_probs`, `rollout_versions`;
            - `(B, P + R)`: `input_ids`, `attention_mask`, `position_ids`.

            With `tool_reward.mode` or `interaction_reward.mode` other than `none` there are also the weighted rewards
            of tools or interactions, at the tokens to which they belong. With `add` they are `turn_rewards` `(B, R)`,
            and the caller adds its own score to them. With `replace` they are `rm_scores` `(B, R)`, the score itself.

            The batch has been verified against the engine's output, unless `certificate_share` is 0. Changes that
            the caller makes later are not verified. `otc` and `void_turn_pattern` belong to the trainers and have no
            effect here. Outages, too, affect only running conversations: those that had ended before a verdict
            stay in the batch, and `outage.stop_s` ends no run.

        Raises:
            ConfigError, ToolContractError, InteractionContractError: The author of the data, a tool, an interaction or
                the configuration made a mistake; raised on every rank.
            CertificateError: The batch differs from the engine's output; raised on every rank.
            RuntimeError: Called inside a running event loop; call it in a thread there.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._generate(prompts)
        raise RuntimeError(
            "generate_sequences blocks and cannot be called inside a running event loop; "
            "run it in a thread with `await asyncio.to_thread(rollout.generate_sequences, prompts)`"
        )

    def _generate(self, prompts: DataProto) -> DataProto:
        group = self._tensor_parallel_group()
        leader = dist.get_global_rank(group, 0)
        # Rank 0 shares its error in the same way as its result. Otherwise the other ranks would hang.
        shared: list[Any] = [None]
        if dist.get_rank() == leader:
            self._loop = self._loop or asyncio.Runner()
            try:
                shared[0] = self._loop.run(self._run_batch(prompts))
            except BaseException as error:  # sent to the other ranks, and raised on every rank
                shared[0] = _sendable(error)
        dist.broadcast_object_list(shared, src=leader, group=group)
        if isinstance(shared[0], BaseException):
            raise shared[0]
        return self._to_batch(shared[0], prompts)

    async def _run_batch(self, prompts: DataProto) -> list[CertifiedOutput]:
        runner = self._runner = self._runner or await self._build_runner(prompts.meta_info)
        step = int(prompts.meta_info.get("global_steps", 0))
        sampling = runner.sampling(self._sampling(prompts.meta_info))
        rows = [{key: value[i] for key, value in prompts.non_tensor_batch.items()} for i in range(len(prompts))]
        _number_sessions(rows)
        requests = [await runner.request(row, sampling, uuid4().hex) for row in rows]
        validation = bool(prompts.meta_info.get("validate"))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_outputs(runner, request, row, step, validation))
                for request, row in zip(requests, rows, strict=True)
            ]
        return [output for task in tasks for output in task.result()]

    def _sampling(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        source = self.config.val_kwargs if meta_info.get("validate") else self.config
        sampling = {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}
        return {**sampling, **meta_info.get("sampling_params", {})}

    async def _build_runner(self, meta_info: Mapping[str, Any]) -> Runner:
        model = self.model_config
        model_type = getattr(model.hf_config, "model_type", None)
        if takes_images(model_type):
            raise ConfigError(
                f"generate_sequences takes no vision-language models (model_type {model_type!r}), because its batches "
                "have no image features; use the agent loop multiturn_agent"
            )
        if (mode := settings_of(self.config).context.mode) != "append":
            raise ConfigError(
                f"generate_sequences returns a row for each row, and custom.multiturn.context.mode={mode} makes "
                "several; set the mode to append, or use the agent loop multiturn_agent"
            )
        if settings_of(self.config).trains_user:
            raise ConfigError(
                "generate_sequences returns a row for each row, and custom.multiturn.train has rows of the user, too; "
                "leave it out, or use the agent loop multiturn_agent"
            )
        # verl gives a rollout no more than its own sections.
        data = {"apply_chat_template_kwargs": meta_info.get("apply_chat_template_kwargs")}
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=self.config), data=data)
        runner = build_runner(config, LoadedModel(model.tokenizer, model_type), await self._make_engine())
        close_at_end([*runner.tools.values(), *runner.interactions.values()])
        return runner

    async def _make_engine(self) -> Engine:
        """Return the engine of this replica, which is its SGLang server.

        Raises:
            EngineError: This rank has no server.
        """
        await self._init_server_adapter()
        if self.server_actor is None:
            raise EngineError("this rank has no SGLang server; only tensor-parallel rank 0 of a replica speaks to one")
        return VerlEngine(self.server_actor.generate.remote)

    def _tensor_parallel_group(self) -> dist.ProcessGroup:
        if self.device_mesh is None:
            if not dist.is_initialized():
                raise ConfigError("generate_sequences needs torch.distributed; initialize the process group first")
            size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
            pipeline = self.config.pipeline_model_parallel_size
            shape = (dist.get_world_size() // (size * pipeline), size, pipeline)
            self.device_mesh = init_device_mesh("cpu", mesh_shape=shape, mesh_dim_names=("dp", "infer_tp", "infer_pp"))
        group: dist.ProcessGroup = self.device_mesh["infer_tp"].get_group()
        return group

    def _to_batch(self, outputs: list[CertifiedOutput], prompts: DataProto) -> DataProto:
        prompt_width, response_width = self.config.prompt_length, self.config.response_length
        fill = LoadedModel(self.model_config.tokenizer, None).fill_id

        def left(rows: list[list[int]], value: int) -> torch.Tensor:
            return torch.tensor([[value] * (prompt_width - len(row)) + row for row in rows])

        def right(rows: list[list[Any]], value: float) -> torch.Tensor:
            return torch.tensor([row + [value] * (response_width - len(row)) for row in rows])

        prompts_BP = left([output.prompt_ids for output in outputs], fill)
        responses_BR = right([output.response_ids for output in outputs], fill)
        attention_BT = torch.cat(
            [
                left([[1] * len(output.prompt_ids) for output in outputs], 0),
                right([[1] * len(output.response_ids) for output in outputs], 0),
            ],
            dim=1,
        )
        batch = TensorDict(
            {
                "prompts": prompts_BP,
                "responses": responses_BR,
                "response_mask": right([output.response_mask for output in outputs], 0),
                "rollout_log_probs": right([output.response_logprobs or [] for output in outputs], 0.0),
                "rollout_versions": right([output.versions for output in outputs], NO_VERSION),
                "input_ids": torch.cat([prompts_BP, responses_BR], dim=1),
                "attention_mask": attention_BT,
                "position_ids": (attention_BT.cumsum(dim=1) - 1).clamp(min=0),
            },
            batch_size=len(outputs),
        )
        settings = settings_of(self.config)
        modes = {settings.tool_reward.mode, settings.interaction_reward.mode}
        if modes != {"none"}:
            scores = torch.zeros(responses_BR.shape)
            for row, output in enumerate(outputs):
                for position, reward in output.turn_rewards:
                    scores[row, position] += reward
            batch["rm_scores" if "replace" in modes else "turn_rewards"] = scores
        _verify(batch, outputs)
        extra = {key: np.empty(len(outputs), dtype=object) for key in outputs[0].extra_fields}
        for row, output in enumerate(outputs):
            for key, value in output.extra_fields.items():
                extra[key][row] = value
        turns = np.array([output.num_turns for output in outputs], dtype=np.int32)
        return DataProto(
            batch=batch, non_tensor_batch={**prompts.non_tensor_batch, **extra, "__num_turns__": turns}, meta_info={}
        )


async def _outputs(
    runner: Runner, request: Request, row: Mapping[str, Any], step: int, validation: bool
) -> list[CertifiedOutput]:
    """Follow the conversation of a row, and return its rows in verl's form."""
    known = {"agent_name": AGENT_LOOP, "global_steps": step, **row}
    with follow(known, runner.records, name=request.request_id, validation=validation):
        return await runner.outputs(request, row, step)


def _number_sessions(rows: list[dict[str, Any]]) -> None:
    """Give the rows that share a `uid` numbers from 0 (`session_id`); a number that the caller gave stays."""
    seen: Counter[str] = Counter()
    for row in rows:
        uid = str(row.get("uid", ""))
        row.setdefault("session_id", seen[uid])
        seen[uid] += 1


def _verify(batch: TensorDict, outputs: list[CertifiedOutput]) -> None:
    """Compare a batch with the engine's output.

    Raises:
        CertificateError: The batch differs from the engine's output.
    """
    found: list[Violation] = []
    columns = {name: column.numpy() for name, column in batch.items()}
    width = columns["prompts"].shape[1]
    for i, output in enumerate(outputs):
        if not output.receipts:
            continue  # certificate_share=0
        here = columns["attention_mask"][i] == 1
        prompt, response = here[:width], here[width:]
        receipts = Receipts.from_bytes(output.receipts)
        row = CertificateRow(
            prompt_ids=columns["prompts"][i][prompt],
            response_ids=columns["responses"][i][response],
            mask=columns["response_mask"][i][response],
            logprobs=columns["rollout_log_probs"][i][response],
            versions=columns["rollout_versions"][i][response],
            input_ids=columns["input_ids"][i][here],
            position_ids=columns["position_ids"][i][here],
        )
        found += verify(row, receipts, filtered=receipts.invalid)
    if found:
        raise CertificateError(
            f"the batch is not what the engine returned ({len(found)} violations in {len(outputs)} rows): {found[0]}"
        )


def _sendable(error: BaseException) -> BaseException:
    """Return the error to send to the other ranks: the first of a group, replaced where it cannot be pickled."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an author's exception class may refuse in any way
        return RuntimeError(describe(error))
    return error
