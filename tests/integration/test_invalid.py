"""Invalid conversations within verl: nothing of them is trained, and they do not count in their groups."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.integration.trainer_rows import CALL, WritableStore, make_output, make_trainer, step

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

MODES = ["sync", "colocate_async", "separate_async"]
ANSWER = "2<|im_end|>"
EPSILON = 1e-6


def add(store: WritableStore, uid: str, scores: list[float | None], broken: float = 0.0) -> None:
    """Add a group of conversations to the store.

    Args:
        store: TransferQueue within this process.
        uid: The group's uid.
        scores: Score of each conversation. With None, the engine fails after a turn.
        broken: Score of the conversations in which the engine failed.
    """
    for session, score in enumerate(scores):
        # Without a last turn the scripted engine fails.
        turns = [CALL] if score is None else [CALL] * (session % 2) + [ANSWER]
        output = make_output(uid, session, turns)
        assert output.extra_fields["stop_reason"] == ("engine_error" if score is None else "finished")
        output.reward_score = broken if score is None else score
        fields = store.add(uid, session, output)
        for name in ("advantages", "old_log_probs"):
            del fields[name]
        fields["old_log_probs"] = fields["rollout_log_probs"] - 0.01


def expected_of(estimator: str, std: bool, group: list[float | None], tokens: list[int]) -> list[float]:
    """Compute a group's advantages in plain numpy, before any whitening over the batch.

    Args:
        estimator: Name of verl's advantage estimator.
        std: Whether to divide by the standard deviation.
        group: Score of each conversation, None for an invalid one.
        tokens: Number of trained tokens of each conversation.
    """
    valid = [i for i, score in enumerate(group) if score is not None]
    scores = np.array([group[i] for i in valid], np.float64)
    advantages = np.zeros(len(group))
    if len(valid) < 2:
        return advantages.tolist()
    if estimator in ("grpo", "grpo_vectorized"):  # verl does not pass to the second one that `std` is off
        made = (scores - scores.mean()) / (scores.std(ddof=1) + EPSILON if std or "_" in estimator else 1.0)
    elif estimator in ("rloo", "rloo_vectorized"):
        made = scores - (scores.sum() - scores) / (len(scores) - 1)
    elif estimator == "opo":
        weights = np.array([tokens[i] for i in valid], np.float64)
        made = scores - (weights * scores).sum() / weights.sum()
    elif estimator == "grpo_passk":
        made = np.zeros(len(scores))
        best, second = np.sort(scores)[::-1][:2]
        made[scores.argmax()] = (best - second) / (scores.std(ddof=1) + EPSILON if std else 1.0)
    else:
        made = scores - scores.mean()
    advantages[valid] = made
    return advantages.tolist()


GROUPS: dict[str, list[float | None]] = {
    "wins": [1.0, 1.0, 1.0, None],
    "mixed": [1.0, None, 0.0, 0.25],
    "single": [None, 1.0, None, None],
    "none": [None] * 4,
    "whole": [1.0, 0.0, 0.5, 0.75],
}


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg"]
)
def test_an_invalid_conversation_does_not_count_in_its_group(store: WritableStore, estimator: str, std: bool) -> None:
    for uid, scores in GROUPS.items():
        add(store, uid, scores, broken=-3.0)
    trainer = make_trainer(algorithm__adv_estimator=estimator, algorithm__norm_adv_by_std_in_grpo=std)
    metrics = step(trainer, store.batch())
    tokens = {key: int(row["rollout_versions"].ge(0).sum()) for key, row in store.rows.items()}
    expected = [
        expected_of(estimator, std, group, [tokens[f"{uid}_{i}_0"] for i in range(4)]) for uid, group in GROUPS.items()
    ]
    rows = [f"{uid}_{i}_0" for uid in GROUPS for i in range(4)]
    made = dict(zip(rows, np.concatenate(expected), strict=True))
    compared = [f"{uid}_{i}_0" for uid in ("wins", "mixed", "whole") for i in range(4) if GROUPS[uid][i] is not None]
    if estimator == "gpg":  # gpg multiplies by all rows over those with a score other than 0
        factor = len(compared) / sum(float(store.rows[key]["rm_scores"].sum()) != 0 for key in compared)
        made = {key: value * factor for key, value in made.items()}
    if estimator == "reinforce_plus_plus_baseline":
        trained = np.repeat([made[key] for key in compared], [tokens[key] for key in compared])
        mean, deviation = trained.mean(), np.sqrt(trained.var(ddof=1) + 1e-8)
        made.update({key: (made[key] - mean) / deviation for key in compared})
    for key in rows:
        assert store.advantage(key) == pytest.approx(made[key], abs=1e-5), key
        assert store.rows[key]["returns"].shape == store.rows[key]["response_mask"].shape
    assert store.advantage("single_1_0") == 0.0
    assert store.rows["wins_3_0"]["advantages"].eq(0).all()
    assert metrics["rollout/invalid_share"] == 9 / 20
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/certificate/rows"] == 20


def test_pass_at_k_of_the_valid_ones(store: WritableStore) -> None:
    add(store, "mixed", GROUPS["mixed"], broken=5.0)
    step(make_trainer(algorithm__adv_estimator="grpo_passk", algorithm__norm_adv_by_std_in_grpo=False), store.batch())
    assert [store.advantage(f"mixed_{i}_0") for i in range(4)] == [0.75, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_three_wins_and_a_broken_one_in_every_trainer(store: WritableStore, mode: str) -> None:
    add(store, "u", [1.0, 1.0, 1.0, None])
    trainer = make_trainer(mode)
    assert step(trainer, store.batch())["rollout/certificate/violations"] == 0
    assert [store.advantage(f"u_{i}_0") for i in range(4)] == [0.0] * 4
    assert trainer.updates == [list(store.rows)]


def test_only_what_is_asked_is_changed(store: WritableStore) -> None:
    """Check that only the advantages change.

    Sampled ids, logprobs and rewards stay, and verl alone computes a batch of valid rows.
    """
    add(store, "u", [1.0, None], broken=-3.0)
    row = store.rows["u_1_0"]
    assert not row["response_mask"].any()
    assert row["rollout_versions"].ge(0).any()
    assert float(row["rm_scores"].sum()) == -3.0
    before = {name: row[name].clone() for name in ("responses", "rollout_log_probs", "rollout_versions", "rm_scores")}
    step(make_trainer(), store.batch())
    assert all(row[name].equal(column) for name, column in before.items())


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_estimators_that_compare_nothing_within_a_group(store: WritableStore, estimator: str) -> None:
    """These estimators read only trained tokens, so invalid rows change nothing."""
    add(store, "u", [1.0, 0.0, None, None], broken=-3.0)
    add(store, "single", [None, 1.0, None, None], broken=-3.0)
    for row in store.rows.values():
        row["values"] = row["rollout_log_probs"] * 0
    trainer = make_trainer(algorithm__adv_estimator=estimator)
    step(trainer, store.batch())
    valid = ["u_0_0", "u_1_0", "single_1_0"]
    found = {key: store.rows[key]["advantages"].clone() for key in valid}
    assert all(column.abs().sum() > 0 for column in found.values())
    step(trainer, store.batch(valid))
    for key in valid:
        np.testing.assert_allclose(store.rows[key]["advantages"], found[key], atol=1e-6)


def test_a_single_valid_one_of_two(store: WritableStore) -> None:
    add(store, "u", [1.0, None])
    add(store, "v", [1.0, 0.0])
    step(make_trainer(actor_rollout_ref__rollout__n=2, algorithm__norm_adv_by_std_in_grpo=False), store.batch())
    assert [store.advantage(key) for key in ("u_0_0", "u_1_0", "v_0_0", "v_1_0")] == [0.0, 0.0, 0.5, -0.5]


@pytest.mark.parametrize(("tokens", "advantages"), [(2, [0.5, -0.5]), (1, [0.0, 0.0])])
def test_as_few_trained_tokens_as_an_estimator_can_take(
    store: WritableStore, tokens: int, advantages: list[float]
) -> None:
    """The whitening in verl divides by the number of tokens less one, and raises for a single token."""
    add(store, "u", [1.0, 0.0, None])
    for key, kept in (("u_0_0", 1), ("u_1_0", tokens - 1)):
        row = store.rows[key]
        row["response_mask"] = row["response_mask"] * 0
        row["response_mask"][:kept] = 1
    settings = {"actor_rollout_ref__rollout__custom__multiturn__certificate_share": 0.0}
    step(make_trainer(algorithm__norm_adv_by_std_in_grpo=False, **settings), store.batch())
    assert [store.advantage(key) for key in ("u_0_0", "u_1_0")] == [advantages[0], advantages[1] if tokens > 1 else 0.0]


def test_groups_of_one_that_are_meant(store: WritableStore) -> None:
    for uid in ("u", "v"):
        add(store, uid, [1.0])
    step(make_trainer(actor_rollout_ref__rollout__n=1), store.batch())
    assert store.advantage("u_0_0") == pytest.approx(1.0)


def test_rejection_sampling_and_a_kl_penalty(store: WritableStore) -> None:
    """The second computation uses the changes of verl's first one: the mask, and the rewards less the penalty."""
    import torch

    add(store, "u", [1.0, 0.0, None, 0.0])
    for row in store.rows.values():
        row["ref_log_prob"] = row["old_log_probs"].clone() - 0.5
    rejected = store.rows["u_3_0"]
    rejected["old_log_probs"] = rejected["rollout_log_probs"] - 9.0
    trainer = make_trainer(
        algorithm__use_kl_in_reward=True,
        algorithm__kl_penalty="kl",
        algorithm__norm_adv_by_std_in_grpo=False,
        algorithm__rollout_correction={
            "rollout_is": None,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.1_2",
        },
    )
    trainer.kl_ctrl_in_reward = SimpleNamespace(value=0.1, update=lambda **kwargs: None)
    assert step(trainer, store.batch())["rollout/certificate/violations"] == 0
    assert not rejected["response_mask"].any()
    rewards = {key: float(row["token_level_rewards"].sum()) for key, row in store.rows.items()}
    trained = {key: int((row["rollout_versions"] >= 0).sum()) for key, row in store.rows.items()}
    assert rewards["u_0_0"] == pytest.approx(1.0 - 0.05 * trained["u_0_0"], abs=1e-5)
    compared = [rewards[f"u_{i}_0"] for i in (0, 1, 3)]
    for i in (0, 1):
        assert store.advantage(f"u_{i}_0") == pytest.approx(rewards[f"u_{i}_0"] - np.mean(compared), abs=1e-5)
    assert torch.equal(store.rows["u_2_0"]["token_level_rewards"], store.rows["u_2_0"]["rm_scores"])


def test_rows_of_others_and_padding(store: WritableStore) -> None:
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    add(store, "u", [1.0, None, 0.0])
    row, tag = construct_minimal_padding_template(store.rows["u_0_0"], store.tags["u_0_0"], 0)
    row["old_log_probs"] = row["rollout_log_probs"]
    uid = f"pad{uuid4().hex}"
    store.rows[f"{uid}_0_0"], store.tags[f"{uid}_0_0"] = {**row, "uid": uid}, tag
    # Rows of another loop, without a field of validity: two rows of one conversation, and a sibling.
    for key in ("x_0_0", "x_0_1", "x_1_0"):
        store.rows[key] = {**store.rows["u_0_0" if key.startswith("x_0") else "u_2_0"], "uid": "x"}
        store.rows[key]["metrics"] = {"generate_sequences": 0.1}
        store.tags[key] = dict(store.tags["u_0_0"])
    settings = {"actor_rollout_ref__rollout__custom__multiturn__certificate_share": 0.0}
    step(make_trainer(algorithm__norm_adv_by_std_in_grpo=False, **settings), store.batch())
    assert [store.advantage(f"u_{i}_0") for i in range(3)] == [0.5, 0.0, -0.5]
    assert [store.advantage(key) for key in ("x_0_0", "x_0_1", "x_1_0")] == [0.5, 0.5, -0.5]
    assert store.advantage(f"{uid}_0_0") == 0.0


def test_a_batch_without_a_trained_token_is_not_trained_on(
    store: WritableStore, caplog: pytest.LogCaptureFixture
) -> None:
    add(store, "u", [None] * 4, broken=1.0)
    trainer = make_trainer(algorithm__rollout_correction={"rollout_is": None, "rollout_rs": None})
    metrics = step(trainer, store.batch())
    assert trainer.updates == []
    assert metrics["rollout/skipped_updates"] == 1
    assert metrics["rollout/invalid_share"] == 1.0
    assert metrics["rollout/certificate/violations"] == 0
    assert "1 updates without a trained token are skipped" in caplog.text
    assert all(row["advantages"].eq(0).all() and row["returns"].eq(0).all() for row in store.rows.values())


def test_an_update_of_invalid_rows_alone_is_skipped(store: WritableStore) -> None:
    for uid, scores in (("u", [1.0, 0.0, None, 1.0]), ("v", [None] * 4), ("w", [1.0, 0.0, 1.0, 0.0])):
        add(store, uid, scores)
    trainer = make_trainer()
    keys = list(store.rows)
    assert step(trainer, store.batch())["rollout/skipped_updates"] == 1
    assert trainer.updates == [[*keys[:4], *keys[8:]]]
    whole = make_trainer()
    assert step(whole, store.batch(keys[:4]), store.batch(keys[8:]))["rollout/skipped_updates"] == 0
    assert whole.updates == [keys[:4], keys[8:]]


def test_the_certificate_reads_what_the_critic_gets(store: WritableStore) -> None:
    from verl_multiturn import CertificateError

    add(store, "u", [1.0, 0.0])
    for row in store.rows.values():
        row["values"] = row["rollout_log_probs"] * float("nan")
    settings = {"algorithm__adv_estimator": "grpo"}  # which does not read them
    assert step(make_trainer(**settings), store.batch())["rollout/certificate/violations"] == 0
    with pytest.raises(CertificateError, match="values"):
        step(make_trainer(use_critic=True, **settings), store.batch())


def test_each_step_and_update_verifies_another_share(store: WritableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.certificate import part

    for uid in "uvwx":
        add(store, uid, [1.0, 0.0])
    drawn: list[tuple[str, ...]] = []

    def recorded(keys: list[str], *rest: Any) -> Any:
        drawn.append(tuple(keys))
        return fetch(keys, *rest)

    fetch = part.fetch
    monkeypatch.setattr(part, "fetch", recorded)
    trainer = make_trainer(actor_rollout_ref__rollout__custom__multiturn__certificate_share=0.5)
    for trainer.global_steps, trainer.local_trigger_step in ((4, 0), (4, 0), (4, 1), (5, 0)):
        step(trainer, store.batch())
    assert [len(keys) for keys in drawn] == [4] * 4
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_a_batch_whose_updates_all_train_something_goes_to_verl_as_it_is(
    store: WritableStore, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.updates import TrainedUpdates

    add(store, "u", [1.0, 0.0, None, 0.0])
    updates, batch, made = TrainedUpdates(group_size=4), store.batch(), object()
    given: list[Any] = []

    def update(batch: Any, metrics: dict[str, Any]) -> Any:
        given.append(batch)
        return made

    settings: Any = SimpleNamespace(ppo_mini_batch_size=1, ppo_epochs=1, shuffle=False)
    workers = SimpleNamespace(_dispatch_info={"actor": [0]})
    assert updates.run(batch, {}, update, settings, workers, "actor") is made
    assert [each is batch for each in given] == [True]
    assert "skipped" not in caplog.text


T, F = True, False


@pytest.mark.parametrize(
    ("trained", "size", "ranks", "shuffled", "kept"),
    [
        ([T, F, F, T], 2, 1, False, [0, 1, 2, 3]),
        ([F, F, F, T], 2, 1, False, [2, 3]),
        ([F, F, F, F], 2, 1, False, []),
        # With two ranks, the updates are rows 0 and 2, then rows 1 and 3.
        ([F, F, F, T], 2, 2, False, [1, 3]),
        ([F, F, T, T], 2, 2, False, [0, 1, 2, 3]),
        ([F, T, F, F, T, T, F, F], 4, 2, False, [0, 1, 4, 5]),
        ([F, T, F, F, F, F, F, T], 4, 2, False, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([F, F, T, F, F, F, F, F], 4, 2, False, [2, 3, 6, 7]),
        # With shuffling, any of the rows may come together.
        ([F, T, F, F, T, F], 2, 1, True, [1, 4]),
        ([F, T, F, T, T, F], 2, 1, True, [1, 3, 4, 5]),
        ([F, T, T, T], 2, 1, True, [0, 1, 2, 3]),
        # Batches that verl refuses are passed to verl.
        ([F, F, F], 2, 1, False, [0, 1, 2]),
        ([F, F, F, F], 2, 4, False, [0, 1, 2, 3]),
    ],
)
def test_the_rows_of_updates_that_train_something(
    trained: list[bool], size: int, ranks: int, shuffled: bool, kept: list[int]
) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.updates import rows_to_train

    assert rows_to_train(trained, size, ranks, shuffled) == kept


def test_the_critic_skips_as_the_actor_does(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, None, None])
    trainer = make_trainer(
        actor_rollout_ref__rollout__n=1, critic={"ppo_mini_batch_size": 1, "ppo_epochs": 2, "shuffle": True}
    )
    asked: list[str] = []

    class Workers:
        def __init__(self) -> None:
            self._dispatch_info: dict[str, Any] = {}

        def _query_dispatch_info(self, mesh: str) -> list[int]:
            asked.append(mesh)
            return [0, 0]

    updates: list[list[str]] = []
    base = type(trainer).__mro__[-2]

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> None:
        updates.append(list(batch.keys))

    base._update_critic = update  # type: ignore[attr-defined]
    trainer.critic_wg = Workers()
    batch = store.batch()
    batch.extra_info["temperature"] = 0.5
    assert trainer._update_critic(batch, {}) is batch
    assert (updates, asked) == ([["u_0_0", "u_1_0"]], ["train"])
    assert trainer._updates.metrics() == {"rollout/skipped_updates": 4}
