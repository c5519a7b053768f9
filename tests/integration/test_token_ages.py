"""The ages of trained tokens: measured, bounded by the mask, and certified. And late groups begun anew."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.integration.trainer_rows import CALL, WritableStore, make_output, make_trainer, put_in_place, step
from verl_multiturn import CertificateError

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

ETA = "actor_rollout_ref__rollout__custom__multiturn__max_staleness"
STRATEGY = "actor_rollout_ref__rollout__custom__multiturn__staleness_strategy"
SHARE = "rollout/async/masked_share"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    """Hold a group of two conversations. Each has two turns, sampled by versions 1 and 3; the trainer is at step 4."""
    made = WritableStore()
    put_in_place(made, monkeypatch)
    for session in range(2):
        add(made, "u", session)
    return made


def add(store: WritableStore, uid: str, session: int, first: int = 1, second: int = 3) -> dict[str, Any]:
    """Add a row whose first turn was sampled by the version `first` and whose second by `second`."""
    import torch

    from verl_multiturn.certificate.receipts import Receipts

    output = make_output(uid, session, [CALL, "2<|im_end|>"])
    output.reward_score = float(session)
    output.extra_fields["reward_extra_info"] = {}
    fields = store.add(uid, session, output)
    receipts = Receipts.from_bytes(fields["rollout_receipts"].numpy().tobytes())
    versions = np.full(len(fields["responses"]), -1)
    generations = []
    for receipt, version in zip(receipts.generations, (first, second), strict=True):
        generations.append(replace(receipt, versions=np.full(len(receipt.ids), version)))
        start = receipt.prompt_tokens - len(fields["prompts"])
        versions[start : start + len(receipt.ids)] = version
    fields["rollout_versions"] = torch.from_numpy(versions)
    (made,) = Receipts.of_rows(receipts.request_id, generations, [0, 0], receipts.uid, receipts.session_id)
    written = made.to_bytes()
    fields["rollout_receipts"] = torch.from_numpy(np.frombuffer(written, np.uint8).copy())
    known = [version for version in (first, second) if version >= 0] or [4]
    store.tags[f"{uid}_{session}_0"] = {"min_global_steps": min(known), "max_global_steps": max(known)}
    return fields


def trained_versions(store: WritableStore, key: str) -> set[int]:
    row = store.rows[key]
    return set(row["rollout_versions"][row["response_mask"] == 1].tolist())


def turn_tokens(store: WritableStore) -> tuple[int, int]:
    versions = store.rows["u_0_0"]["rollout_versions"]
    return int((versions == 1).sum()), int((versions == 3).sum())


def test_ages_are_measured_without_a_bound(store: WritableStore) -> None:
    first, second = turn_tokens(store)
    metrics = step(make_trainer("separate_async"), store.batch())
    assert metrics["rollout/async/age/mean"] == pytest.approx(2 * first / (first + second))
    assert metrics["rollout/async/age/max"] == 2
    assert SHARE not in metrics
    assert trained_versions(store, "u_0_0") == {1, 3}


@pytest.mark.parametrize("strategy", ["drop", "wait", "mask", "reroll"])
def test_old_tokens_leave_the_loss(store: WritableStore, strategy: str) -> None:
    first, second = turn_tokens(store)
    before = {key: row["rollout_versions"].tolist() for key, row in store.rows.items()}
    trainer = make_trainer("colocate_async", **{ETA: 1, STRATEGY: strategy})
    metrics = step(trainer, store.batch())
    for key, row in store.rows.items():
        expected = [int(version >= 2) for version in before[key]]  # in step 4 version 2 has the age 1
        assert row["response_mask"].tolist() == expected
        assert row["loss_mask"].tolist() == expected
    assert metrics["rollout/async/age/max"] == 0
    assert metrics["rollout/async/age/mean"] == 0
    assert metrics[SHARE] == pytest.approx(first / (first + second))
    assert metrics["rollout/certificate/violations"] == 0
    assert trainer.updates == [["u_0_0", "u_1_0"]]


def test_the_bound_itself_is_trained(store: WritableStore) -> None:
    metrics = step(make_trainer("separate_async", **{ETA: 2}), store.batch())
    assert trained_versions(store, "u_0_0") == {1, 3}
    assert metrics[SHARE] == 0


def test_sync_has_no_bound_and_no_ages(store: WritableStore) -> None:
    metrics = step(make_trainer("sync", **{ETA: 0}), store.batch())
    assert trained_versions(store, "u_0_0") == {1, 3}
    assert not [name for name in metrics if name.startswith("rollout/async/")]


def test_a_batch_of_too_old_tokens_alone_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    for session in range(2):
        add(store, "u", session, 0, 1)
    trainer = make_trainer("separate_async", **{ETA: 0, "actor_rollout_ref__rollout__n": 2})
    metrics = step(trainer, store.batch())
    assert [row["response_mask"].any().item() for row in store.rows.values()] == [False, False]
    assert trainer.updates == []
    assert metrics[SHARE] == 1
    assert metrics["rollout/skipped_updates"] == 1
    assert metrics["rollout/certificate/violations"] == 0
    assert "rollout/async/age/mean" not in metrics


def test_tokens_of_an_unknown_version_are_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    for session in range(2):
        add(store, "u", session, -1, 3)
    metrics = step(make_trainer("separate_async", **{ETA: 8}), store.batch())
    assert trained_versions(store, "u_0_0") == {3}
    assert metrics["rollout/certificate/violations"] == 0


def test_rows_of_other_loops_have_the_age_of_their_tag(store: WritableStore) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    for session, oldest in enumerate((1, 3, None)):
        row = add(store, "v", session)
        for name in ("rollout_versions", "rollout_receipts", "metrics"):
            del row[name]
        store.tags[f"v_{session}_0"]["min_global_steps"] = oldest
    make_trainer("separate_async", **{ETA: 1})._ages.look(BatchRows(store.batch()), 4)
    assert [bool(store.rows[f"v_{session}_0"]["response_mask"].any()) for session in range(3)] == [False, True, False]
    assert trained_versions(store, "u_0_0") == {3}


@pytest.mark.parametrize("column", ["response_mask", "loss_mask"])
@pytest.mark.parametrize(("version", "value"), [(1, 1), (3, 0)], ids=["zero_too_few", "zero_too_many"])
def test_the_certificate_accepts_exactly_these_zeros(
    store: WritableStore, column: str, version: int, value: int
) -> None:
    trainer = make_trainer("separate_async", **{ETA: 1})
    look = trainer._ages.look

    def spoiled(batch: Any, now: int) -> None:
        look(batch, now)
        row = store.rows["u_1_0"]
        changed = row[column].clone()
        changed[int((row["rollout_versions"] == version).nonzero()[0])] = value
        row[column] = changed

    trainer._ages.look = spoiled
    name = "mask" if column == "response_mask" else column
    with pytest.raises(CertificateError, match=f"{name} is {value}, by the receipts {1 - value}"):
        step(trainer, store.batch())


class Manager:
    """An agent-loop manager that records its requests."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.cancelled: list[str] = []
        self.submitted: list[Any] = []

    def cancel(self, uids: list[str]) -> None:
        """Cancel groups; one of them just writes its last row."""
        self.cancelled += uids
        self.queue.tags[f"{uids[0]}_1_0"] = {"min_global_steps": 0}

    def generate_sequences(self, batch: Any) -> None:
        self.submitted.append((batch, {uid: dict(self.queue.tags[uid]) for uid in batch["uid"]}))


class PromptQueue:
    """TransferQueue with prompts' data."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.data: dict[str, dict[str, Any]] = {}

    def kv_list(self, partition_id: str) -> dict[str, dict[str, dict[str, Any]]]:
        assert partition_id == "train"
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[key]
            self.data.pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        return list_of_dict_to_tensordict([self.data[key] for key in keys])

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: Any = None, fields: Any = None) -> None:
        for i, key in enumerate(keys):
            self.tags.setdefault(key, {}).update(tags[i] if tags else {})
            if fields is not None:
                self.data[key] = {name: fields[name][i] for name in fields.keys()}  # noqa: SIM118


def test_late_groups_are_begun_anew_under_another_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    from verl_multiturn.verl_bridge.compat import row_store

    queue = PromptQueue()
    monkeypatch.setattr(row_store, "transfer_queue", queue)
    monkeypatch.setattr(trainer_base, "tq", queue)
    for uid, dispatched, rerolls in (("late", 2, 0), ("again", 2, 2), ("spent", 1, 3), ("in-time", 3, 0)):
        more = {"rerolls": rerolls} if rerolls else {}
        queue.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": dispatched, **more}
        queue.data[uid] = {"uid": uid, "raw_prompt": [{"role": "user", "content": uid}], "index": len(queue.data)}
        queue.tags[f"{uid}_0_0"] = {"min_global_steps": dispatched - 1}
    trainer = make_trainer("separate_async", **{ETA: 1})
    trainer.agent_loop_manager = manager = Manager(queue)
    trainer.trainer_mode = "separate_async"
    submit = get_trainer_cls("separate_async")._submit_batch_to_rollout
    trainer._submit_batch_to_rollout = lambda batch: submit(trainer, batch)
    prepared: list[int] = []
    monkeypatch.setattr(type(trainer).__mro__[2], "prepare_step", lambda self: prepared.append(1) or {}, raising=False)

    trainer._rerolls.begin_step()
    assert trainer.prepare_step() == {}
    assert prepared == [1]
    assert manager.cancelled == ["late", "again"]
    assert trainer._rerolls.metrics() == {"rollout/async/rerolled": 2}
    ((submitted, tags_then),) = manager.submitted
    new = list(submitted["uid"])
    assert [[message["content"] for message in prompt] for prompt in submitted["raw_prompt"]] == [["late"], ["again"]]
    assert submitted["global_steps"] == 4
    assert submitted["__rerolled_from__"] == {new[0]: "late", new[1]: "again"}
    assert "__rerolled_from__" not in queue.data[new[0]]
    assert trainer._rerolls.rerolled == {"late": new[0], "again": new[1]}
    assert not set(new) & {"late", "again"}
    assert not [uid for uid in new if "_" in uid]
    tag = {"is_prompt": True, "status": "pending", "global_steps": 4}
    assert tags_then == {new[0]: {**tag, "rerolls": 1}, new[1]: {**tag, "rerolls": 3}}
    assert set(queue.tags) == {"spent", "spent_0_0", "in-time", "in-time_0_0", *new}
    assert queue.data[new[0]]["index"] == 0


def test_warm_up_is_not_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[float] = []
    for eta, asked, expected in ((1, 3, 1), (4, 3, 3), (0, 1, 0), (None, 3, 3)):
        trainer = make_trainer("colocate_async", **{ETA: eta, "data__train_batch_size": 4})
        trainer._restored_tq_prompt_count = 0
        base = type(trainer).__mro__[2]
        monkeypatch.setattr(base, "_add_async_warmup_batches", lambda self, n: added.append(n), raising=False)
        trainer._add_async_warmup_batches(asked)
        assert added.pop() == expected


def built_by(mode: str, *changes: str) -> Any:
    """Return the replay buffer that our trainer of a mode builds from verl's whole configuration."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    from tests.trainer_config import compose_config
    from verl_multiturn.rollout.groups.staleness import StalenessBound

    trainer = object.__new__(get_trainer_cls(f"multiturn_{mode}"))
    trainer.config, trainer.trainer_mode, trainer._bound = compose_config(changes), mode, StalenessBound(1, "drop")
    return trainer._build_replay_buffer()


def test_our_trainers_build_our_buffer_with_verls_arguments() -> None:
    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import (
        MultiTurnReplayBuffer,
        MultiTurnReplayBufferAsync,
    )

    filtering = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
    for mode in ("colocate_async", "separate_async"):
        built = built_by(mode, *filtering)
        assert type(built) is MultiTurnReplayBufferAsync
        assert built.filter_groups_metric == "acc"
        assert built.refill_fn.__name__ == "_add_prompts_to_generate"
    built = built_by("sync", *filtering, "algorithm.filter_groups.max_inflight_gen_batches=3")
    assert type(built) is MultiTurnReplayBuffer
    assert (built.filter_groups_metric, built.max_inflight_gen_batches, built.gen_batch_size) == ("acc", 3, 1)


def test_a_sampler_of_the_users_is_left_alone(tmp_path: Path) -> None:
    sampler = "trainer.v1.sampler.custom_sampler"
    (tmp_path / "mine.py").write_text(
        "from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync\nclass Mine(ReplayBufferAsync): pass\n"
    )
    built = built_by("separate_async", f"{sampler}.path={tmp_path}/mine.py", f"{sampler}.name=Mine")
    assert type(built).__name__ == "Mine"


def test_a_sampler_of_the_users_does_not_hide_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `sync` nothing else asks for dead workers until the batch is there, which would be never."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler

    done: list[Any] = []

    class Users(ReplayBuffer):
        def __init__(self) -> None:
            pass

        def _sync_metadata_from_transfer_queue(self) -> None:
            done.append("listed")

        def sample(self) -> None:
            self._sync_metadata_from_transfer_queue()

    class Verls:
        def fit(self, agent_loop_manager: Any) -> None:
            self.replay_buffer.sample()  # type: ignore[attr-defined]

    class Ours(hooks.MultiTurnHooks, Verls):
        def __init__(self) -> None:
            self.replay_buffer = Users()
            self._sampler = CustomSampler(self.replay_buffer)
            self._outages = SimpleNamespace(look=lambda: done.append("outages"), causes=None)

        def look_after_servers(self) -> None:
            done.append("servers")

    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)
    Ours().fit(SimpleNamespace(agent_loop_workers=[], wait=done.append))
    assert done == [0.0, "servers", "outages", "listed"]


def test_the_buffers_counts_are_among_the_metrics(store: WritableStore) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from verl_multiturn.rollout.groups.staleness import StalenessBound
    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    trainer = make_trainer("separate_async", **{ETA: 2})
    verls = ReplayBufferAsync("separate_async", {}, 3, "drop", {})
    trainer._sampler = replay_buffer_from(verls, StalenessBound(2, "reroll"), 2)
    metrics = step(trainer, store.batch())
    names = {name.removeprefix("rollout/async/") for name in metrics if name.startswith("rollout/async/")}
    assert names == {"age/mean", "age/max", "masked_share", "rerolled", "evicted", "prompts_lost", "listings"}
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert not [name for name in names if f"`async/{name}`" not in text]
