"""Conversations of several rows in our trainers: certificate, metrics, advantages, weights, number of updates."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.trainer_rows import CALL, WritableStore, make_output, make_trainer, step

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

SETTINGS = "actor_rollout_ref__rollout__custom__multiturn__"
WINDOW = {f"{SETTINGS}context__mode": "window"}


def add(
    store: WritableStore,
    uid: str,
    session: int,
    rewards: list[float],
    score: float = 0.0,
    states: str = "",
    valid: bool = True,
) -> None:
    """Write a conversation with one turn a row, as verl's worker writes our loop's output.

    Args:
        store: Target of the writes.
        uid: Uid of the prompt.
        session: Number of the conversation.
        rewards: Reward of each turn.
        score: Result of `compute_score`.
        states: A letter for the state of each turn.
        valid: Whether the conversation is valid.
    """
    from verl_multiturn.certificate.receipts import Receipts

    outputs = [make_output(uid, session, ["2<|im_end|>"]) for _ in rewards]
    own = [Receipts.from_bytes(output.receipts) for output in outputs]
    joined = Receipts.of_rows(
        f"{uid} {session}",
        [each.generations[0] for each in own],
        list(range(len(own))),
        uid,
        session,
        invalid=not valid,
    )
    for row, (output, reward, receipts) in enumerate(zip(outputs, rewards, joined, strict=True)):
        output.receipts = receipts.to_bytes()
        output.reward_score = score  # verl gives all rows that of the last
        last = len(output.response_ids)
        output.turn_rewards = [(last - 1, reward)] if reward else []
        state = states[row] if states else None
        output.stats |= {
            "valid": valid,
            "tool_score": sum(rewards),
            "turns": [{"turn": row, "start": 0, "end": last, "reward": reward, "state": state}],
            "conversation": {"rows": len(rewards), "row": row},
        }
        if not valid:
            output.response_mask = [0] * last
        fields = store.add(uid, session, output)
        first = f"{uid}_{session}_0"
        store.rows[f"{uid}_{session}_new{row}"], store.tags[f"{uid}_{session}_new{row}"] = fields, store.tags[first]
        del store.rows[first], store.tags[first]
    for row in range(len(rewards)):
        for kept in (store.rows, store.tags):
            kept[f"{uid}_{session}_{row}"] = kept.pop(f"{uid}_{session}_new{row}")  # type: ignore[attr-defined]


def advantages(store: WritableStore, uid: str = "u") -> dict[str, float]:
    return {key: round(store.advantage(key), 5) for key in store.rows if key.startswith(uid)}


def trainer_of(estimator: str, **changes: Any) -> Any:
    settings = {"algorithm__adv_estimator": estimator, "algorithm__norm_adv_by_std_in_grpo": False}
    return make_trainer(**{**settings, **WINDOW, **changes})


def updating(trainer: Any) -> Any:
    """Set how many prompts the batch has, as `_balance_batch` does in a whole trainer."""
    trainer._prompts = 1
    return trainer


def test_the_rows_rewards_add_up_to_the_conversations(store: WritableStore) -> None:
    add(store, "u", 0, [0.5, 0.0, 0.25], score=1.0)
    assert store.scores() == {"u_0_0": [0.5], "u_0_1": [], "u_0_2": [1.25]}
    told = [row["metrics"]["rollout"]["conversation"] for row in store.rows.values()]
    assert told == [{"rows": 3, "row": row, "score": 1.75} for row in range(3)]


def test_three_wins_and_one_broken_conversation_of_several_rows(store: WritableStore) -> None:
    for session, rows in enumerate((1, 2, 3)):
        add(store, "u", session, [0.0] * rows, score=1.0)
    add(store, "u", 3, [-3.0, -3.0], valid=False)
    metrics = step(updating(trainer_of("mt_grpo")), store.batch())
    assert set(advantages(store).values()) == {0.0}
    assert metrics["rollout/trajectories"] == 4
    assert metrics["rollout/invalid_share"] == 0.25
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/certificate/rows"] == 8


def test_conversations_are_compared_and_the_order_of_rows_changes_nothing(store: WritableStore) -> None:
    add(store, "u", 0, [0.0, 0.0, 0.5], score=0.5)
    add(store, "u", 1, [0.0])
    keys = list(store.rows)
    expected = {"u_0_0": 0.5, "u_0_1": 0.5, "u_0_2": 0.5, "u_1_0": -0.5}
    for order in (keys, keys[::-1]):
        step(updating(trainer_of("mt_grpo")), store.batch(order))
        assert advantages(store) == expected


def test_turns_are_compared_with_the_whole_group(store: WritableStore) -> None:
    add(store, "u", 0, [0.0, 1.0])
    add(store, "u", 1, [0.0])
    add(store, "u", 2, [9.0, 9.0], valid=False)
    step(updating(trainer_of("mt_turns", **{f"{SETTINGS}advantage__gamma": 0.5})), store.batch())
    assert advantages(store) == {"u_0_0": 0.25, "u_0_1": 0.5, "u_1_0": -0.25, "u_2_0": 0.0, "u_2_1": 0.0}


def test_a_score_is_discounted_by_the_turns_after_it_in_all_rows(store: WritableStore) -> None:
    """The reward r is r * gamma^(T - i) less its mean, where the turns of a conversation lie in several rows."""
    gamma, rewards, lengths = 0.9, [1.0, -0.25, 0.7, 0.0], [4, 1, 3, 2]
    for session, (reward, rows) in enumerate(zip(rewards, lengths, strict=True)):
        add(store, "u", session, [0.0] * rows, score=reward)
    metrics = step(updating(trainer_of("mt_turns", **{f"{SETTINGS}advantage__gamma": gamma})), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    for session, rows in enumerate(lengths):
        for i in range(rows):
            decayed = [
                r * gamma ** (last - 1 - i) if i < last else 0.0 for r, last in zip(rewards, lengths, strict=True)
            ]
            expected = decayed[session] - sum(decayed) / len(decayed)
            assert store.advantage(f"u_{session}_{i}") == pytest.approx(expected, abs=1e-6)


def test_the_published_numbers_of_gigpo_in_a_batch(store: WritableStore) -> None:
    add(store, "u", 0, [0.0, 1.0], states="ab")
    add(store, "u", 1, [0.0, 0.0, 0.0], states="aca")
    settings = {f"{SETTINGS}advantage__gamma": 0.95, f"{SETTINGS}advantage__across": "rows"}
    step(updating(trainer_of("mt_gigpo", **settings)), store.batch())
    expected = [37 / 30, 3 / 5, -43 / 60, -2 / 5, -43 / 60]
    assert list(advantages(store).values()) == pytest.approx(expected, abs=1e-4)


def test_in_one_row_a_turns_advantage_goes_to_its_own_tokens(store: WritableStore) -> None:
    for session, turns in enumerate(([CALL, "2<|im_end|>"], ["2<|im_end|>"])):
        output = make_output("u", session, turns)
        output.reward_score = float(len(turns) - 1)
        store.add("u", session, output)
    trainer = make_trainer(algorithm__adv_estimator="mt_turns", **{f"{SETTINGS}advantage__gamma": 0.5})
    assert step(trainer, store.batch())["rollout/certificate/violations"] == 0
    row = store.rows["u_0_0"]
    first, second = row["metrics"]["rollout"]["turns"]
    assert set(row["advantages"][first["start"] : first["end"]].tolist()) == {0.25}
    assert set(row["advantages"][second["start"] : second["end"]].tolist()) == {0.5}
    assert not row["advantages"][row["response_mask"] == 0].any()


def test_mt_grpo_is_verls_grpo_where_each_conversation_is_a_row(store: WritableStore) -> None:
    for session, score in enumerate((1.0, 0.25, 0.0)):
        output = make_output("u", session, [CALL, "2<|im_end|>"])
        output.reward_score = score
        store.add("u", session, output)
    found = []
    for estimator in ("grpo", "mt_grpo"):
        step(make_trainer(algorithm__adv_estimator=estimator), store.batch())
        found.append(list(advantages(store).values()))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert any(found[0])


@pytest.mark.parametrize("estimator", ["mt_grpo", "mt_turns", "mt_gigpo"])
def test_a_conversation_that_failed_before_its_first_turn_changes_no_advantage(
    store: WritableStore, estimator: str
) -> None:
    for session, reward in enumerate([1.0, 0.0, 1.0]):
        add(store, "u", session, [reward])
    add(store, "u", 3, [0.0], valid=False)
    one_row = {f"{SETTINGS}context.mode": "append"}
    with_it = trainer_of(estimator, **one_row)
    store.rows["u_3_0"]["metrics"]["rollout"]["turns"] = []
    step(with_it, store.batch())
    found = advantages(store)
    assert found.pop("u_3_0") == 0.0
    del store.rows["u_3_0"], store.tags["u_3_0"]
    step(trainer_of(estimator, **one_row), store.batch())
    assert advantages(store) == found
    assert any(found.values())


def test_a_missing_row_ends_the_run(store: WritableStore) -> None:
    from verl_multiturn import CertificateError

    add(store, "u", 0, [0.0, 0.0, 1.0])
    add(store, "u", 1, [0.0])
    keys = list(store.rows)
    for lost, what in (("u_0_1", "rows \\[0, 2\\], expected \\[0, 1\\]"), ("u_0_2", "one is listed with 2")):
        with pytest.raises(CertificateError, match=what):
            step(updating(trainer_of("mt_grpo")), store.batch([key for key in keys if key != lost]))


def test_the_certificate_draws_whole_conversations(store: WritableStore) -> None:
    for session in range(4):
        add(store, "u", session, [0.0] * (session + 1))
    share = {f"{SETTINGS}certificate_share": 0.5}
    found = set()
    for seed in range(8):
        trainer = updating(trainer_of("mt_grpo", **share))
        trainer.global_steps = 4 + seed
        metrics = step(trainer, store.batch())
        assert metrics["rollout/certificate/violations"] == 0
        found.add(metrics["rollout/certificate/rows"])
    assert found <= {3, 4, 5, 6, 7}
    assert len(found) > 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_rows_of_a_conversation_weigh_as_one(store: WritableStore, mode: str) -> None:
    add(store, "u", 0, [0.0, 0.0, 0.0], score=1.0)
    add(store, "u", 1, [0.0])
    settings = {f"{SETTINGS}context__weight": "conversation", "actor_rollout_ref__actor__loss_agg_mode": mode}
    assert step(updating(trainer_of("mt_grpo", **settings)), store.batch())["rollout/certificate/violations"] == 0
    made = advantages(store)
    assert made == {**{f"u_0_{row}": round(0.5 * 2 / 3, 5) for row in range(3)}, "u_1_0": -0.5 * 2}


def make_batch(prompts: int, rows: int) -> Any:
    keys = [f"u{i % prompts}_0_{i // prompts}" for i in range(rows)]
    return SimpleNamespace(keys=keys, tags=[{} for _ in keys], partition_id="train")


@pytest.mark.parametrize(
    ("prompts", "mini", "ranks", "micro", "multiple"),
    [(4, 2, 1, 1, 2 * 4), (4, 2, 8, 1, 2 * 8), (5, 2, 3, 1, 3 * 12), (1, 8, 1, 3, 12), (4, 4, 2, 3, 12)],
)
def test_the_number_of_updates_follows_prompts(prompts: int, mini: int, ranks: int, micro: int, multiple: int) -> None:
    from tests.integration.trainer_rows import make_config
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
    from verl_multiturn.verl_bridge.trainer.rows.updates import mini_batches, rows_multiple, updates_of

    config = make_config(
        actor_rollout_ref__actor__ppo_mini_batch_size=mini, actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=micro
    )
    assert rows_multiple(prompts, ranks, config) == multiple
    updates, actor = updates_of(prompts, config), config.actor_rollout_ref.actor
    for rows in (multiple, 5 * multiple):
        assert len(BatchRows(make_batch(prompts, rows)).groups) == prompts
        with mini_batches(rows, updates, 4, actor):
            size = actor.ppo_mini_batch_size * 4  # as verl computes it
            assert (rows % size, rows // size, size % (ranks * micro)) == (0, updates, 0)
        assert actor.ppo_mini_batch_size == mini


def test_what_is_said_of_a_row_is_fetched_once_in_a_step(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here four hooks ask for it, verl replaces the batch before the last one, and a step has two updates."""
    for uid in "uv":
        for session in range(2):
            add(store, uid, session, [0.0, 0.5], score=float(session))
    store.rows["pad_0_0"], store.tags["pad_0_0"] = store.rows["v_0_0"], {"is_padding": True}
    asked: list[list[str]] = []
    get = store.kv_batch_get

    def counted(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        if "metrics" in select_fields:
            asked.append(keys)
        return get(keys, partition_id, select_fields)

    monkeypatch.setattr(store, "kv_batch_get", counted)
    monkeypatch.setattr("verl_multiturn.verl_bridge.trainer.verify.BatchVerifier.verify", lambda *arguments: None)
    settings = {f"{SETTINGS}otc": {"form": "grpo"}, f"{SETTINGS}void_turn_pattern": "strict"}
    trainer, keys = updating(trainer_of("mt_grpo", **settings)), list(store.rows)
    for _ in range(2):
        metrics = step(trainer, store.batch(keys[:4]), store.batch(keys[4:]))
        assert asked == [keys[:4], keys[4:8]]
        assert metrics["rollout/trajectories"] == 2  # this step ends with the batch of its last update
        asked.clear()
    trainer.replay_buffer = SimpleNamespace(sample=lambda: (store.batch(keys[:4]), {}))
    type(trainer).__mro__[-2]._validate = lambda self: {"groups": len(self.replay_buffer.sample()[0].keys)}  # type: ignore[attr-defined]
    assert trainer._validate()["val/rollout/trajectories"] == 2
    assert asked == [keys[:4]]


def test_the_trainer_asks_for_rows_by_prompts(store: WritableStore) -> None:
    trainer = trainer_of("mt_grpo", actor_rollout_ref__actor__ppo_mini_batch_size=2)
    base = type(trainer).__mro__[-2]
    asked = []

    def balance(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        asked.append(self._get_required_batch_multiple(2))
        return batch

    sizes = []

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        sizes.append(self.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        return batch

    base._balance_batch, base._update_actor = balance, update  # type: ignore[attr-defined]
    for uid in "uvw":
        for session in range(4):
            add(store, uid, session, [0.0, 0.0], score=float(session))
    batch = store.batch()
    assert trainer._balance_batch(batch, {}) is batch
    assert asked == [8]  # two updates of three prompts, each with a multiple of 4 rows
    trainer._update_actor(batch, {})
    assert sizes == [3]  # times `rollout.n` it is half of the 24 rows


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"critic.enable": "True"}, "critic.enable=True: mt_grpo uses no critic"),
        ({"actor_rollout_ref.rollout.n": "1"}, "rollout.n=1: it compares conversations of one prompt"),
        ({"algorithm.gamma": "0.9"}, "algorithm.gamma=0.9: .* discounts turns, not tokens"),
        ({"algorithm.filter_groups.enable": "True"}, ""),
        ({"distillation.enabled": "True"}, ""),
        (
            {
                "distillation.enabled": "True",
                "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "verl.trainer.ppo.v1.Manager",
            },
            "conversations may have several rows here, and verl 0.9.1's own workers ask a teacher about the last one a",
        ),
        (
            {
                "distillation.enabled": "True",
                "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "verl.trainer.ppo.v1.Manager",
                "+actor_rollout_ref.rollout.custom.multiturn.context.mode": "append",
                "actor_rollout_ref.rollout.agent.default_agent_loop": "recorded_agent",
            },
            "conversations may have several rows here",
        ),
        (
            {
                "distillation.enabled": "True",
                "distillation.distillation_loss.use_policy_gradient": "True",
                "algorithm.rollout_correction.rollout_is": "token",
            },
            "use_policy_gradient=True with .*rollout_is='token': verl 0.9.1 gives that loss the importance weights",
        ),
        (
            {
                "distillation.enabled": "True",
                "distillation.distillation_loss.use_task_rewards": "False",
                "+actor_rollout_ref.rollout.custom.multiturn.context.weight": "conversation",
            },
            "context.weight='conversation' with .*use_task_rewards=False: it has no effect",
        ),
        ({"algorithm.filter_groups.enable": "True", "algorithm.filter_groups.metric": "acc"}, ""),
        ({}, ""),
    ],
)
def test_what_is_refused_at_start_up(changes: dict[str, str], what: str) -> None:
    from contextlib import nullcontext

    from tests.integration.test_refusals import composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup.refusals.rows import ESTIMATOR
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    several = {
        "+actor_rollout_ref.rollout.custom.multiturn.context.mode": "window",
        "algorithm.adv_estimator": "mt_grpo",
        "actor_rollout_ref.rollout.n": "4",
    }
    config = composed(**{**several, **changes})
    with pytest.raises(ConfigError, match=what) if what else nullcontext():
        check(RunView(config), [Section("", ESTIMATOR)])
