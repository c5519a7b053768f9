"""Outages in our trainers: affected conversations are dropped, with a cause that the certificate checks."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_refusals import composed
from tests.integration.trainer_rows import (
    CALL,
    WritableStore,
    make_config,
    make_output,
    make_trainer,
    put_in_place,
    step,
)
from tests.support.warm_python import start_ray, stop_ray
from verl_multiturn.calls.outages.messages import OutageState, StoreLostError

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

MODES = ["sync", "colocate_async", "separate_async"]
SETTINGS = "actor_rollout_ref__rollout__custom__multiturn__"
SEARCH = "tool search"
OUTAGE, REWARD_OUTAGE = "outage", "reward_outage"


STATE = OutageState(True, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, "ConnectionError: refused")


class FakeKeeper:
    """A keeper that has decided on these conversations, and knows these outages; a `lost` one knows nothing."""

    def __init__(self, *touched: str, lost: bool = False, **states: OutageState) -> None:
        self._touched, self.lost = set(touched), lost
        self.states = {name.replace("_", " "): state for name, state in states.items()}
        self.asked: list[list[str]] = []

    def touched(self, ids: list[str]) -> set[str]:
        self.asked.append(ids)
        self._require_alive()
        return self._touched  # also others than were requested

    def outages(self) -> dict[str, OutageState]:
        self._require_alive()
        return self.states

    def _require_alive(self) -> None:
        if self.lost:
            raise StoreLostError("the keeper does not answer")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    store.kv_list = lambda partition_id: {partition_id: {}}  # type: ignore[attr-defined]
    return store


def add(
    store: WritableStore, scores: list[float], met: str = "", unrewarded: str = "", uid: str = "u", rows: int = 1
) -> None:
    """Add a group of conversations.

    Args:
        store: TransferQueue within this process.
        scores: The score of each conversation.
        met: Numbers of the conversations with an outage, one digit each.
        unrewarded: Numbers of those whose reward could not be computed for a cause of ours.
        uid: The group's uid.
        rows: How many rows each conversation has.
    """
    from verl_multiturn.certificate.receipts import Receipts

    for session, score in enumerate(scores):
        outputs = [make_output(uid, session, [CALL, "2<|im_end|>"]) for _ in range(rows)]
        first = [Receipts.from_bytes(output.receipts).generations for output in outputs]
        where = [row for row in range(rows) for _ in first[row]]
        receipts = Receipts.of_rows(
            f"{uid} {session}",
            [generation for own in first for generation in own],
            where,
            uid,
            session,
            outages=[SEARCH] if str(session) in met else [],
        )
        for row, (output, own) in enumerate(zip(outputs, receipts, strict=True)):
            output.stats |= {
                "outages": list(own.outages),
                "request_id": f"{uid}_{session}",
                "conversation": {"rows": rows, "row": row},
            }
            output.receipts = own.to_bytes()
            output.reward_score = score
            output.extra_fields["reward_extra_info"] = {"acc": score, "outage": float(str(session) in unrewarded)}
            store.add(uid, session, output, row)


def trainer_of(keeper: FakeKeeper, mode: str = "sync", stop_s: float = 1800.0, **changes: Any) -> Any:
    from verl_multiturn.verl_bridge.trainer.outages import StepOutages

    trainer = make_trainer(mode, **{"algorithm__norm_adv_by_std_in_grpo": False, **changes})
    trainer._outages = StepOutages(keeper, stop_s)
    return trainer


def masked(store: WritableStore, column: str = "response_mask") -> list[str]:
    return [key for key, row in store.rows.items() if not row[column].any()]


def advantages(store: WritableStore, uid: str = "u") -> list[float]:
    return [round(store.advantage(key), 5) for key in store.rows if key.startswith(f"{uid}_")]


@pytest.mark.parametrize("mode", MODES)
def test_what_an_outage_has_touched_is_not_trained_and_does_not_count_in_its_group(
    store: WritableStore, mode: str
) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], met="12")
    before = {key: dict(row) for key, row in store.rows.items()}
    keeper = FakeKeeper("u_1", "another")
    metrics = step(trainer_of(keeper, mode), store.batch())
    assert keeper.asked == [["u_1", "u_2"]], "the keeper is asked for those that met one, and for no others"
    assert masked(store) == masked(store, "loss_mask") == ["u_1_0"]
    assert advantages(store) == [0.5, 0.0, -0.5, 0.0]
    for key, row in store.rows.items():
        changed = {"advantages", "returns"} | ({"response_mask", "loss_mask"} if key == "u_1_0" else set())
        assert all(row[name] is before[key][name] for name in before[key].keys() - changed), key
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/invalid_share"] == 0.25
    assert metrics["rollout/outage/conversations"] == 1
    assert metrics["rollout/outage/rows_left_out"] == 1


def test_a_reward_that_could_not_be_judged_is_left_out_always(store: WritableStore) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], unrewarded="1")
    keeper = FakeKeeper()
    metrics = step(trainer_of(keeper), store.batch())
    assert keeper.asked == [], "there is nothing to ask"
    assert masked(store) == masked(store, "loss_mask") == ["u_1_0"]
    assert advantages(store) == [0.5, 0.0, -0.5, 0.0]
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/outage/rows_left_out"] == 1
    assert metrics["rollout/reward/outage/mean"] == 0.25


def test_a_single_late_call_in_a_healthy_run_stays_what_it_is(store: WritableStore) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], met="0123")
    metrics = step(trainer_of(FakeKeeper()), store.batch())
    assert masked(store) == []
    assert metrics["rollout/outage/conversations"] == 0
    assert "rollout/outage/rows_left_out" not in metrics, "the keeper knows no name"


@pytest.mark.parametrize("estimator", ["mt_grpo", "grpo"])
def test_all_rows_of_a_conversation_are_left_out(store: WritableStore, estimator: str) -> None:
    add(store, [1.0, 9.0, 0.0], met="1", rows=2)
    settings = {"algorithm__adv_estimator": estimator, f"{SETTINGS}context__mode": "window"}
    trainer = trainer_of(FakeKeeper("u_1"), **settings)
    trainer._prompts = 1
    metrics = step(trainer, store.batch())
    assert masked(store) == ["u_1_0", "u_1_1"]
    assert advantages(store)[2:4] == [0.0, 0.0]
    assert 0 < max(advantages(store)) <= 1.0, "9 is in no mean"
    assert metrics["rollout/outage/conversations"] == 1
    assert metrics["rollout/outage/rows_left_out"] == 2
    assert metrics["rollout/certificate/violations"] == 0


def test_a_step_of_several_updates_asks_for_each_batch_and_counts_once(store: WritableStore) -> None:
    add(store, [1.0, 0.0], met="1")
    add(store, [1.0, 0.0], met="0", unrewarded="1", uid="v")
    keeper = FakeKeeper("u_1", "v_0")
    trainer = trainer_of(keeper, "separate_async", actor_rollout_ref__rollout__n=2)
    keys = list(store.rows)
    trainer.batches = [store.batch(keys[:2]), store.batch(keys[2:])]
    metrics = step(trainer, *trainer.batches)
    assert keeper.asked == [["u_1"], ["v_0"]]
    assert masked(store) == ["u_1_0", "v_0_0", "v_1_0"]
    assert metrics["rollout/outage/rows_left_out"] == 3
    assert trainer.updates == [["u_0_0", "u_1_0"]], "an update without a trained token is skipped"


def test_otc_does_not_count_what_is_left_out(store: WritableStore) -> None:
    add(store, [1.0, 1.0], met="1")
    scores = {key: row["rm_scores"].clone() for key, row in store.rows.items()}
    step(trainer_of(FakeKeeper("u_1"), **{f"{SETTINGS}otc__form": "ppo"}), store.batch())
    assert not store.rows["u_0_0"]["rm_scores"].equal(scores["u_0_0"])
    assert store.rows["u_1_0"]["rm_scores"].equal(scores["u_1_0"])


@pytest.fixture
def cluster() -> Iterator[None]:

    start_ray(num_cpus=0)
    yield
    stop_ray()


async def test_the_trainer_asks_the_keeper_of_the_run(cluster: None) -> None:
    import ray

    from verl_multiturn.calls.outages.breaker import Outage
    from verl_multiturn.calls.outages.messages import Sums
    from verl_multiturn.verl_bridge.run_keeper import RayKeeper, run_keeper
    from verl_multiturn.verl_bridge.trainer.outages import OutageStoreClient

    asked = OutageStoreClient()
    assert asked.touched(["r1"]) == set(), "no worker has needed it"
    assert asked.outages() == {}
    worker = RayKeeper()
    met = [Outage(f"r{number}", 0) for number in range(8)]
    await worker.report({SEARCH: Sums(answered=3, outages=met, error="refused")})
    assert asked.touched(["r1", "r9"]) == {"r1"}
    state = asked.outages()[SEARCH]
    assert (state.is_open, state.trips, state.calls, state.outages, state.error) == (True, 1, 11, 8, "refused")
    keeper = run_keeper()
    ray.kill(keeper)
    with contextlib.suppress(ray.exceptions.RayError):
        while True:  # it may still answer for a moment
            ray.get(keeper.outages.remote())
    with pytest.raises(StoreLostError, match="does not answer"):
        asked.touched(["r1"])


Spoil = Callable[[WritableStore, Any], None]


def unmask(key: str, column: str) -> Spoil:
    """Let a token of a row be trained again after the masks were written."""

    def spoil(store: WritableStore, outages: Any) -> None:
        store.rows[key][column] = store.rows[key][column].clone()
        store.rows[key][column][0] = 1

    return spoil


def mask(store: WritableStore, outages: Any) -> None:
    """Leave a row out without a cause."""
    row = store.rows["u_0_0"]
    row["response_mask"] = row["loss_mask"] = row["response_mask"] * 0


def cause(name: str, what: str | None) -> Spoil:
    """Give a conversation a cause, or take its cause away."""

    def spoil(store: WritableStore, outages: Any) -> None:
        honest = outages.causes

        def causes(rows: Any) -> dict[str, Any]:
            found = {**honest(rows), name: what}
            return {key: value for key, value in found.items() if value is not None}

        outages.causes = causes

    return spoil


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (None, unmask("u_1_0", "response_mask"), r"row u_1_0\W.* mask is 1, by the receipts 0"),
        (None, unmask("u_1_0", "loss_mask"), r"row u_1_0\W.* loss_mask is 1, by the receipts 0"),
        (None, unmask("u_2_0", "response_mask"), r"row u_2_0\W.* mask is 1, by the receipts 0"),
        (None, mask, r"row u_0_0\W.* mask is 0, by the receipts 1"),
        (cause("u_3", OUTAGE), None, r"rows u_3_\*.* left out as 'outage', and none of its calls met one"),
        (cause("u_3", REWARD_OUTAGE), None, r"rows u_3_\*.* left out as 'reward_outage', and its reward was judged"),
        (cause("u_1", REWARD_OUTAGE), None, r"rows u_1_\*.* left out as 'reward_outage', and its reward was judged"),
        (cause("u_3", "late"), None, r"rows u_3_\*.* left out as 'late'; known causes are"),
        (cause("u_2", None), None, r"rows u_2_\*.* reward could not be judged, and the cause .* is None"),
        (cause("u_2", OUTAGE), None, r"rows u_2_\*.* reward could not be judged, and the cause .* is 'outage'"),
    ],
)
def test_the_certificate_takes_no_other_mask_and_no_other_cause(
    store: WritableStore, before: Spoil | None, after: Spoil | None, what: str
) -> None:
    from verl_multiturn import CertificateError

    add(store, [1.0, 0.0, 0.5, 0.5], met="1", unrewarded="2")
    trainer = trainer_of(FakeKeeper("u_1"))
    if before is not None:
        before(store, trainer._outages)
    leave_out = trainer._outages.leave_out

    def spoiled(rows: Any) -> None:
        leave_out(rows)
        if after is not None:
            after(store, trainer._outages)

    trainer._outages.leave_out = spoiled
    with pytest.raises(CertificateError, match=what):
        step(trainer, store.batch())


def test_a_cause_whose_rows_are_not_left_out_is_a_violation(store: WritableStore, monkeypatch: Any) -> None:
    from verl_multiturn import CertificateError
    from verl_multiturn.verl_bridge.trainer import outages

    add(store, [1.0, 0.0, 0.5, 0.5], met="1")
    monkeypatch.setattr(outages, "put_zeros", lambda *args: None)
    with pytest.raises(CertificateError, match=r"row u_1_0\W.* mask is 1, by the receipts 0"):
        step(trainer_of(FakeKeeper("u_1")), store.batch())


def test_rows_that_do_not_agree_on_their_outages_are_a_violation(store: WritableStore) -> None:
    import numpy as np
    import torch

    from verl_multiturn import CertificateError
    from verl_multiturn.certificate.receipts import Receipts

    add(store, [1.0, 0.0], met="1", rows=2)
    row = store.rows["u_1_1"]
    receipts = replace(Receipts.from_bytes(row["rollout_receipts"].numpy().tobytes()), outages=[])
    row["rollout_receipts"] = torch.from_numpy(np.frombuffer(receipts.to_bytes(), np.uint8).copy())
    trainer = trainer_of(FakeKeeper(), algorithm__adv_estimator="mt_grpo")
    with pytest.raises(CertificateError, match="do not agree on outages"):
        step(trainer, store.batch())


def test_a_keeper_that_has_died_can_absolve_nobody(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], met="12")
    store.kv_list = lambda partition_id: {"train": {"u": {"is_prompt": True}, "v": {"is_prompt": True}}}  # type: ignore[attr-defined]
    keeper = FakeKeeper(lost=True)
    trainer = trainer_of(keeper)
    metrics = step(trainer, store.batch())
    assert masked(store) == ["u_1_0", "u_2_0"]
    assert metrics["rollout/certificate/violations"] == 0
    assert "the keeper does not answer; conversations that have begun and met a failure are left out" in caplog.text
    # Another keeper does not know the events before it.
    keeper.lost = False
    add(store, [1.0, 0.0, 0.0, 0.5], met="0", uid="v")
    add(store, [1.0, 0.0, 0.0, 0.5], met="0", uid="later")
    step(trainer, store.batch([key for key in store.rows if not key.startswith("u")]))
    assert masked(store)[2:] == ["v_0_0"]


def test_what_a_dead_keeper_could_not_judge_for_the_filter_is_not_trained(store: WritableStore) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], met="12")
    keeper = FakeKeeper(lost=True)
    trainer = trainer_of(keeper)
    # The filter asks first, when verl has removed the prompts of the batch that it has sampled.
    assert trainer._outages.causes(trainer._rows.of(store.batch())) == {"u_1": OUTAGE, "u_2": OUTAGE}
    keeper.lost = False
    step(trainer, store.batch())
    assert masked(store) == ["u_1_0", "u_2_0"]


def test_a_checkpoints_conversations_are_doubted(store: WritableStore) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5], met="1")
    trainer = trainer_of(FakeKeeper(), "separate_async")
    trainer._outages.doubt(["u"])
    assert step(trainer, store.batch())["rollout/certificate/violations"] == 0
    assert masked(store) == ["u_1_0"]


def test_a_run_that_goes_on_doubts_the_groups_that_had_finished(store: WritableStore, tmp_path: Any) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    class Base:
        use_critic = use_reference_policy = False

        def __init__(self, config: Any) -> None:
            self.config = config

        def _load_checkpoint(self) -> None:
            self.global_steps = 3

    tags = {uid: {"is_prompt": True, "status": status} for uid, status in (("u", "finished"), ("v", "running"))}
    store.kv_list = lambda partition_id: {"train": tags}  # type: ignore[attr-defined]
    trainer = type("Trainer", (hooks.MultiTurnHooks, Base), {"mode": "separate_async"})(
        make_config("separate_async", trainer__default_local_dir=str(tmp_path), trainer__resume_mode="auto")
    )
    trainer._load_checkpoint()
    assert trainer._outages._doubtful == {"u"}, "the others are begun again, and the new keeper knows of them"


def test_metrics_of_a_step_are_what_came_in_it(store: WritableStore) -> None:
    add(store, [1.0, 0.0, 0.0, 0.5])
    search = replace(STATE, open_s=12.0, open_total_s=12.0, trips=1, calls=11, outages=9, waiting=5, bugs=2)
    keeper = FakeKeeper(tool_search=search, judge=replace(STATE, is_open=False))
    trainer = trainer_of(keeper)

    def outage_metrics() -> dict[str, float]:
        found = step(trainer, store.batch())
        return {
            key.removeprefix("rollout/outage/"): value
            for key, value in found.items()
            if key.startswith("rollout/outage/")
        }

    first = outage_metrics()
    assert first == {
        "open_s": 12.0, "trips": 1, "calls": 9, "bugs": 2, "waiting": 5, "rows_left_out": 0, "conversations": 0,
        "tool_search/open": 1, "tool_search/trips": 1, "judge/open": 0, "judge/trips": 0,
    }  # fmt: skip
    keeper.states[SEARCH] = replace(search, is_open=False, open_total_s=20.0, trips=3, outages=10, waiting=0)
    assert outage_metrics() == {
        **dict.fromkeys(first, 0), "open_s": 8.0, "trips": 2, "calls": 1, "tool_search/open": 1, "tool_search/trips": 2,
    }  # fmt: skip
    assert set(outage_metrics().values()) == {0}


def test_an_outage_that_does_not_end_ends_the_run_and_is_told_before(caplog: pytest.LogCaptureFixture) -> None:
    from verl_multiturn.verl_bridge.trainer.outages import OutageLasts

    keeper = FakeKeeper(tool_search=replace(STATE, lasting_s=59.0, waiting=7))
    trainer = trainer_of(keeper, stop_s=100.0)
    caplog.clear()  # of the first import of verl
    freed: list[str] = []
    trainer.checkpoint_manager = SimpleNamespace(
        abort_replicas=lambda: freed.append("abort"), sleep_replicas=lambda: freed.append("sleep")
    )
    trainer.look_after_servers = lambda: None
    trainer.look_after()
    assert not caplog.records
    keeper.states[SEARCH] = replace(STATE, lasting_s=60.0, waiting=7)
    trainer.look_after()
    trainer.look_after()
    (record,) = caplog.records
    assert record.getMessage() == (
        "tool search has not been there for 60 s, and 7 calls wait for it (ConnectionError: refused); the run ends "
        "after 100 s (custom.multiturn.outage.stop_s), with a checkpoint where no step is half trained (said once)"
    )
    assert freed == []
    keeper.states[SEARCH] = replace(STATE, open_s=9_000.0, lasting_s=0.0)
    trainer.look_after()  # no part requests it any more
    keeper.states[SEARCH] = replace(STATE, lasting_s=101.0)
    with pytest.raises(OutageLasts, match=r"tool search has not been there for 101 s, longer than .*stop_s=100; "):
        trainer.look_after()
    assert freed == ["abort", "sleep"], "the servers make room for the workers that save"
    trainer._stop = SimpleNamespace(is_made=lambda: False)
    with pytest.raises(OutageLasts):
        trainer.on_step_begin()  # an asynchronous run may never wait
    assert freed == ["abort", "sleep"] * 2


def test_the_run_ends_with_a_checkpoint(store: WritableStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
    from verl_multiturn.verl_bridge.trainer.outages import OutageLasts

    saved: list[int] = []
    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)  # there is no Ray here

    class Base:
        use_critic = use_reference_policy = False

        def __init__(self, config: Any) -> None:
            self.config, self._sampler = config, CustomSampler(None)

        def fit(self, manager: Any) -> None:
            raise OutageLasts("tool search has not been there")

        def _save_checkpoint(self) -> None:
            saved.append(self.global_steps)  # type: ignore[attr-defined]
            (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))  # type: ignore[attr-defined]

    trainer = type("Trainer", (hooks.MultiTurnHooks, Base), {"mode": "sync"})(
        make_config(trainer__default_local_dir=str(tmp_path))
    )
    trainer.global_steps, trainer._whole, trainer._history = 5, 4, None
    manager = SimpleNamespace(agent_loop_workers=[])
    trainer.agent_loop_manager = manager
    with pytest.raises(OutageLasts, match="has not been there; the weights of step 4 are saved in"):
        trainer.fit(manager)
    assert saved == [4]


def test_alarms_are_told_once(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    for uid in ("u", "v", "w"):
        add(store, [1.0, 0.0, 0.5, 0.5], met="012" if uid != "w" else "", uid=uid)
    keeper = FakeKeeper(*[f"{uid}_{session}" for uid in "uv" for session in range(3)])
    trainer = trainer_of(keeper)
    with caplog.at_level(logging.WARNING):
        step(trainer, store.batch())
        step(trainer, store.batch())
    told = [record.getMessage() for record in caplog.records if "said once" in record.getMessage()]
    assert told == [
        "50% of a step's conversations are invalid: outage (said once)",
        "1 of a step's 3 groups have 2 valid conversations or more (said once)",
    ]


def test_no_alarm_where_little_is_invalid(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    add(store, [1.0, 0.0, 0.5, 0.5, 0.5], met="0")
    step(trainer_of(FakeKeeper("u_0")), store.batch())
    assert "said once" not in caplog.text


def validate(store: WritableStore, keeper: FakeKeeper, scored: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = validating(store, keeper, scored)._validate()
    return metrics


def validating(store: WritableStore, keeper: FakeKeeper, scored: dict[str, Any]) -> Any:
    """Return a trainer that validates with the rows in the store, and keeps those that verl scores in `scored`."""
    from verl_multiturn.verl_bridge.trainer import hooks

    class Base:
        use_critic = use_reference_policy = False

        def __init__(self, config: Any) -> None:
            self.config = config
            self.replay_buffer = SimpleNamespace(sample=lambda **arguments: (store.batch(), {}))

        def _validate(self) -> Any:
            batch, _ = self.replay_buffer.sample(global_steps=1, partition_id="val", batch_size=1)
            # verl takes the last row of each conversation.
            last = {key.rsplit("_", 1)[0]: key for key in batch.keys}
            keys = [key for key in batch.keys if key in last.values()]
            uids = [key.rsplit("_", 2)[0] for key in keys]
            sources = ["math"] * len(keys)
            expected = {("math", uid): uids.count(uid) for uid in uids}
            infos = {"acc": [float(store.rows[key]["extra_fields"]["reward_extra_info"]["acc"]) for key in keys]}
            return self._val_metrics_update(sources, uids, infos, [1] * len(keys), expected_acc_counts=expected)  # type: ignore[attr-defined]

        def _val_metrics_update(
            self, sources: Any, uids: Any, infos: Any, turns: Any, expected_acc_counts: Any = None
        ) -> Any:
            scored.update(uids=uids, acc=infos["acc"], expected=expected_acc_counts, turns=len(turns))
            return {}

    trainer = type("Trainer", (hooks.MultiTurnHooks, Base), {"mode": "sync"})(make_config())
    from verl_multiturn.verl_bridge.trainer.outages import StepOutages

    trainer._outages = StepOutages(keeper, 1.0)
    return trainer


@pytest.mark.parametrize("rows", [1, 2])
def test_an_outage_in_a_validation_is_counted_and_not_scored(store: WritableStore, rows: int) -> None:
    add(store, [1.0, 0.25, 0.5], met="1", rows=rows)
    add(store, [0.75], unrewarded="0", uid="v", rows=rows)
    scored: dict[str, Any] = {}
    metrics = validate(store, FakeKeeper("u_1"), scored)
    assert scored == {"uids": ["u", "u"], "acc": [1.0, 0.5], "expected": {("math", "u"): 2}, "turns": 2}
    assert metrics["val/rollout/outage/conversations"] == 2
    assert metrics["val/rollout/trajectories"] == 4
    # A conversation that ended with an outage is not scored either; one that failed otherwise is.
    for key, stop in (("u_0_0", "outage"), ("u_2_0", "engine_error")):
        store.rows[key]["metrics"]["rollout"] |= {"stop": stop, "valid": False}
        last = key if rows == 1 else f"{key[:-1]}1"
        store.rows[last]["metrics"]["rollout"] |= {"stop": stop, "valid": False}
    metrics = validate(store, FakeKeeper(), scored)
    assert scored == {"uids": ["u", "u"], "acc": [0.25, 0.5], "expected": {("math", "u"): 2}, "turns": 2}


def test_a_keeper_that_dies_within_a_validation_can_absolve_nobody(store: WritableStore) -> None:
    add(store, [1.0, 0.25], met="1")
    tags = {"val": {"u": {"is_prompt": True}}}
    store.kv_list = lambda partition_id: {partition_id: tags.get(partition_id, {})}  # type: ignore[attr-defined]
    keeper = FakeKeeper(lost=True)
    scored: dict[str, Any] = {}
    trainer = validating(store, keeper, scored)
    trainer._outages.look()  # the trainer waits
    keeper.lost = False  # there is another one
    trainer._validate()
    assert scored["acc"] == [1.0]


def test_a_validation_of_outages_alone_scores_nothing(store: WritableStore) -> None:
    add(store, [1.0, 0.25], met="01")
    scored: dict[str, Any] = {}
    metrics = validate(store, FakeKeeper("u_0", "u_1"), scored)
    assert scored == {"uids": [], "acc": [], "expected": {}, "turns": 0}
    assert metrics["val/rollout/outage/conversations"] == 2


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, False),
        ({"trainer.use_v1": "False"}, True),
        ({"trainer.use_v1": "False", "+actor_rollout_ref.rollout.custom.multiturn.outage.mode": "off"}, False),
    ],
)
def test_what_another_trainer_leaves_undone_is_told(changes: dict[str, str], is_told: bool) -> None:
    from verl_multiturn.verl_bridge.startup.refusals import SETTINGS
    from verl_multiturn.verl_bridge.startup.table import RefusalRow
    from verl_multiturn.verl_bridge.startup.view import RunView

    run = RunView(composed(**changes))
    (row,) = next(section.checks for section in SETTINGS if section.title == "Outages")
    assert isinstance(row, RefusalRow)
    told = row.message(run)
    assert (told is not None) is is_told
    assert told is None or "outage.mode='pause': conversations that meet an outage end or wait, but only" in told
