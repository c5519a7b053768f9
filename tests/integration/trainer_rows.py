"""Rows of our agent loop in a TransferQueue within this process, and our trainers without workers that take them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>'


def make_output(uid: str, session_id: int, turns: list[str], reward: Mapping[str, Any] | None = None) -> Any:
    """Return the output of our agent loop for a conversation with a scripted engine.

    Args:
        uid: The group.
        session_id: Its number there.
        turns: The text of each turn.
        reward: The section `reward` of verl's configuration.
    """
    import asyncio

    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from tests.support.rollout_config import make_config
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    config = make_config(500)
    OmegaConf.update(config, "reward", reward or {}, force_add=True)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.update(rollout, "multi_turn.tool_config_path", str(ROOT / "tool_configs" / "calculator.yaml"))
    engine = ScriptedEngine([tokenizer.encode(turn) for turn in turns], version=3)
    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), engine)
    row = {"raw_prompt": [{"role": "user", "content": "1+1"}], "uid": uid, "session_id": session_id, "global_steps": 4}
    return asyncio.run(loop.run({"temperature": 1.0, "logprobs": True}, **row))


class Store:
    """TransferQueue within this process; it leaves out a column that one of the requested rows lacks."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.calls = 0

    def add(self, uid: str, session_id: int, output: Any, row: int = 0) -> dict[str, Any]:
        """Write a row as `AgentLoopWorkerTQ` does; `row` is its index in its conversation."""
        import torch

        fields: dict[str, Any] = output.as_dict()
        fields.update(uid=uid, session_id=session_id, loss_mask=fields["response_mask"])
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
        fields["position_ids"] = torch.arange(len(fields["input_ids"]))
        fields["advantages"] = fields["response_mask"].float()
        fields["old_log_probs"] = fields["rollout_log_probs"].clone()
        key = f"{uid}_{session_id}_{row}"
        self.rows[key] = fields
        tags = ("min_global_steps", "max_global_steps")
        self.tags[key] = {name: fields["extra_fields"].get(name) for name in tags}
        return fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        self.calls += 1
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields if all(name in row for row in rows)]
        return list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])

    def batch(self) -> Any:
        return SimpleNamespace(keys=list(self.rows), tags=list(self.tags.values()), partition_id="train")


def put_in_place(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a store in the place of TransferQueue, for our code and for verl's trainers."""
    from verl.trainer.ppo.v1 import trainer_base

    from verl_multiturn.verl_bridge.compat import row_store

    monkeypatch.setattr(row_store, "transfer_queue", store)
    monkeypatch.setattr(trainer_base, "tq", store)


class WritableStore(Store):
    """A store that trainers write to."""

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        import torch

        data = super().kv_batch_get(keys, partition_id, select_fields)
        for name in ("response_mask", "rm_scores", "rollout_log_probs", "old_log_probs"):
            if name in data and not data[name].is_nested:  # also nested when all lengths are equal
                data[name] = torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged)
        return data

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        for i, key in enumerate(keys):
            for name in fields.keys():  # noqa: SIM118  # iterating a TensorDict yields its rows
                self.rows[key][name] = fields[name].unbind()[i]
        return self.batch(keys)

    def batch(self, keys: list[str] | None = None) -> Any:
        from transfer_queue import KVBatchMeta

        keys = list(self.rows) if keys is None else keys
        return KVBatchMeta(keys=keys, tags=[self.tags[key] for key in keys], partition_id="train")

    def scores(self) -> dict[str, list[float]]:
        """Return the values other than 0 in each row's `rm_scores`."""
        return {key: [float(x) for x in row["rm_scores"] if x] for key, row in self.rows.items()}

    def advantage(self, key: str) -> float:
        row = self.rows[key]
        (value,) = set(row["advantages"][row["response_mask"] == 1].tolist()) or {0.0}
        return float(value)


def base_of(verls: type) -> type:
    """Make a trainer of verl without its constructor and workers.

    It gets its batches from `batches`, and keeps the keys of each update in `updates`.

    Args:
        verls: The class of verl's trainer.
    """

    class Base:
        batches: list[Any]
        use_critic = False
        global_steps, local_trigger_step = 4, 0
        actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        _compute_advantage = verls._compute_advantage  # type: ignore[attr-defined]

        def __init__(self, config: Any) -> None:
            self.config = config
            self.updates: list[list[str]] = []
            self.replay_buffer = self._build_replay_buffer()

        def _build_replay_buffer(self) -> Any:
            return None  # a user's own class: there is no TransferQueue

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            for batch in self.batches:
                self._compute_advantage(batch, metrics)
                assert self._update_actor(batch, metrics) is batch
            return batch

        def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
            self.updates.append(list(batch.keys))
            return batch

    return Base


def make_config(mode: str = "sync", **changes: Any) -> Any:
    """Make verl's configuration as our hooks read it, with changes whose names have `__` in the place of dots."""
    from omegaconf import OmegaConf

    config = {
        "data": {"train_batch_size": 4},
        "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False},
        "trainer": {"v1": {"trainer_mode": f"multiturn_{mode}"}, "save_freq": 1},
        "actor_rollout_ref": {
            "rollout": {
                "n": 4,
                "custom": {"multiturn": {}},
                "agent": {"default_agent_loop": "multiturn_agent", "agent_loop_config_path": None},
            },
            "actor": {"ppo_mini_batch_size": 1, "ppo_epochs": 1, "shuffle": False},
        },
    }
    made = OmegaConf.create(config)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value, force_add=True)
    return made


def make_trainer(mode: str = "sync", use_critic: bool = False, **changes: Any) -> Any:
    """Make our trainer of a mode, without the parts that need workers."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    ours, verls = get_trainer_cls(f"multiturn_{mode}").__bases__
    assert verls is get_trainer_cls(mode)
    base = base_of(verls)
    base.use_critic, base.use_reference_policy = use_critic, False  # type: ignore[attr-defined]
    trainer = type("Trainer", (ours, base), {"mode": mode})(make_config(mode, **changes))
    assert trainer.config.trainer.v1.trainer_mode == mode  # verl knows no other name
    trainer.agent_loop_manager = None
    return trainer


def step(trainer: Any, *batches: Any) -> dict[str, Any]:
    """Run a step of a trainer that was made here, and return its metrics."""
    metrics: dict[str, Any] = {}
    trainer.batches = list(batches)
    trainer.step(metrics, {})
    return metrics


def stats_in(store: WritableStore) -> list[Mapping[str, Any]]:
    """Return the stats of the rows that were stored."""
    return [row["metrics"]["rollout"] for row in store.rows.values()]
