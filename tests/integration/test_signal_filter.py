"""Groups without signal: `custom.multiturn.filter`, and the rows that leave the update (`spared.py`)."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_invalid import add
from tests.integration.trainer_rows import WritableStore, make_trainer, step

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

OURS = "actor_rollout_ref__rollout__custom__multiturn"


@pytest.mark.parametrize(
    ("worth", "size", "ranks", "multiple", "kept", "updates"),
    [
        ([1, 1, 2, 2, 2, 0, 1, 1], 4, 1, 1, [2, 3, 4, 6], [0, 0, 1, 1]),
        # Two ranks, two updates: rank 0 has the rows 0–3, and an update two rows of each rank.
        ([1, 2, 2, 1, 1, 1, 2, 1], 4, 2, 1, [1, 2, 4, 6], [0, 1, 0, 1]),
        ([0, 2, 0, 1, 1, 1, 0, 0], 8, 1, 4, [1, 3, 4, 5], [0] * 4),
        ([1, 1, 1, 1, 1, 1, 1, 2], 8, 2, 4, [0, 1, 4, 7], [0] * 4),
        # Without any advantage each update keeps a trained row, as its loss is divided by the tokens.
        ([0, 1, 1, 1, 0, 0, 1, 0], 4, 1, 1, [1, 6], [0, 1]),
        ([1, 2, 2, 2], 4, 1, 4, None, None),
        ([2, 2, 2], 4, 1, 1, None, None),  # verl refuses such a batch
    ],
)
def test_rows_that_stay(
    worth: list[int], size: int, ranks: int, multiple: int, kept: list[int] | None, updates: list[int] | None
) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import thin

    found = thin(worth, size, ranks, multiple)
    assert found == (None if kept is None else (kept, updates))


@pytest.mark.parametrize(
    ("counts", "most", "found"),
    [
        (range(97, 161), 8, 104),  # 97 is a prime number
        (range(3, 9), 8, 3),
        (range(9, 17), 8, 10),
        ([8, 16, 24], 3, 8),
        (range(97, 161), 0, 97),
    ],
)
def test_rows_that_stay_are_divided_into_few_micro_batches(counts: Any, most: int, found: int) -> None:
    from verl_multiturn.verl_bridge.trainer.rows.skipped_rows import fewest_passes, thin

    assert fewest_passes(counts, most) == found
    thinned = thin([2] * 7 + [1] * 9, 16, 1, 1, 4)
    assert thinned is not None
    assert len(thinned.kept) == 8


def trainer_of(**changes: Any) -> Any:
    mini = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, f"{OURS}__filter": "skip"}
    return make_trainer(**mini, **changes)


def test_rows_without_advantages_leave_the_update(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    add(store, "v", [1.0] * 4)
    trainer = trainer_of()
    seen: list[tuple[int, list[float]]] = []
    base = type(trainer).__mro__[-2]
    verls = base._update_actor

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        mini = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        seen.append((mini, [store.advantage(key) for key in batch.keys]))
        return verls(self, batch, metrics)

    base._update_actor = update
    metrics = step(trainer, store.batch())
    assert trainer.updates == [[f"u_{i}_0" for i in range(4)]]
    assert (metrics["rollout/filter/spared_rows"], metrics["rollout/skipped_updates"]) == (4, 0)
    tokens = {key: int(row["loss_mask"].sum()) for key, row in store.rows.items()}
    factor = sum(tokens[f"u_{i}_0"] for i in range(4)) / sum(tokens.values())
    after = [store.advantage(f"u_{i}_0") for i in range(4)]
    assert seen == [(1, pytest.approx([value * factor for value in after]))]
    assert after == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2


def test_a_skipped_group_has_advantages_of_exactly_zero_and_no_old_log_probs(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    add(store, "v", [0.1 + 0.2, 0.3, 0.3, None])
    trainer = trainer_of()
    trainer._spared.silent = frozenset("v")
    asked: list[tuple[list[str], Any]] = []

    def verls(batch: Any, metrics: dict[str, Any]) -> None:
        asked.append((list(batch.keys), batch.extra_info.get("micro_batch_size_per_gpu")))

    batch = store.batch()
    trainer._spared._inferred = 3
    assert trainer._spared.old_log_probs(batch, {}, verls, ranks=1) is batch
    assert asked == [([f"u_{i}_0" for i in range(4)], 2)]
    for i in range(4):
        row = store.rows[f"v_{i}_0"]
        assert row["old_log_probs"].equal(row["rollout_log_probs"])
        assert not row["entropy"].any()
        assert "entropy" not in store.rows[f"u_{i}_0"]
    step(trainer, batch)
    assert [store.advantage(f"v_{i}_0") for i in range(4)] == [0.0] * 4
    assert trainer.updates == [[f"u_{i}_0" for i in range(4)]]


def test_silent_rows_fill_the_micro_batches_of_the_old_log_probs(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0, 0.0])
    add(store, "v", [1.0] * 5)
    trainer = trainer_of()
    trainer._spared.silent = frozenset("v")
    trainer._spared._inferred = 4
    asked: list[tuple[int, Any]] = []
    trainer._spared.old_log_probs(
        store.batch(),
        {},
        lambda part, _: asked.append((len(part.keys), part.extra_info["micro_batch_size_per_gpu"])),
        1,
    )
    assert asked == [(6, 3)]  # 5 rows would be five passes


def test_with_a_bound_the_engines_log_probs_are_taken_and_silent_rows_leave_the_update(store: WritableStore) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    add(store, "v", [1.0] * 4)
    trainer = trainer_of(**{f"{OURS}__old_log_prob_bound": 0.05})
    asked: list[int] = []

    def verls(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        asked.append(len(batch.keys))
        return batch  # which `add` gave its old log-probs

    base = type(trainer).__mro__[-2]
    verls_step = base.step

    def step_of(self: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._compute_old_log_prob(self.batches[0], metrics)
        return verls_step(self, metrics, timing_raw)

    base._compute_old_log_prob, base.step = verls, step_of
    trainer._sampler.filter.silent = frozenset("v")
    metrics = step(trainer, store.batch())
    assert asked == [1]  # a row is compared, and those of silent groups are not distinguished
    assert metrics["rollout/old_log_prob/engine_share"] == 7 / 8
    assert (metrics["rollout/filter/spared_log_probs"], metrics["rollout/filter/spared_rows"]) == (0, 4)
    assert metrics["rollout/certificate/violations"] == 0
    assert trainer.updates == [[f"u_{i}_0" for i in range(4)]]


def test_with_prefix_trees_each_rank_has_silent_groups(store: WritableStore) -> None:
    for uid in "vwxy":
        add(store, uid, [1.0, 0.0])
    trainer = trainer_of()
    trainer._sampler.filter.silent = frozenset("vw")
    trainer._keeps_groups = True
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    type(trainer).__mro__[-2]._balance_batch = lambda self, batch, metrics: batch
    batch = store.batch()
    for tag in batch.tags:
        tag["seq_len"] = 9 if tag is batch.tags[0] else 1
    trainer._balance_batch(batch, {})
    assert [name.partition("_")[0] for name in batch.keys] == ["v", "v", "x", "x", "w", "w", "y", "y"]


def test_where_all_are_silent_each_rank_computes_a_row(store: WritableStore) -> None:
    for uid in "vw":
        add(store, uid, [0.0] * 4)
    trainer = trainer_of()
    trainer._spared.silent = frozenset("vw")
    asked: list[list[str]] = []
    trainer._spared.old_log_probs(store.batch(), {}, lambda batch, metrics: asked.append(list(batch.keys)), ranks=2)
    assert asked == [["v_0_0", "v_1_0"]]
    metrics = step(trainer, store.batch())
    # As without a filter, the optimizer makes its step.
    assert (trainer.updates, metrics["rollout/skipped_updates"]) == ([[f"v_{i}_0" for i in range(4)]], 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_kl_loss": True},
        {"entropy_coeff": 0.01},
        {"policy_loss": {"loss_mode": "kl_cov"}},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
    ],
)
def test_rows_stay_where_they_matter(store: WritableStore, changes: dict[str, Any]) -> None:
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    add(store, "v", [1.0] * 4)
    trainer = trainer_of(**{f"actor_rollout_ref__actor__{name}": value for name, value in changes.items()})
    assert trainer._spared is None
    step(trainer, store.batch())
    assert trainer.updates == [list(store.rows)]


def test_the_join_says_why_a_row_left_the_update(store: WritableStore, tmp_path: Path) -> None:
    from tests.integration.test_joining import Run, agrees
    from tests.integration.test_joining import add as add_rows

    for uid, scores in (("u", [1.0, 0.0, 0.0, 1.0]), ("v", [1.0] * 4), ("w", [1.0, 0.0, 0.5, 0.5])):
        add_rows(store, uid, list(scores))
    changes = {"actor_rollout_ref__actor__ppo_mini_batch_size": 3, f"{OURS}__filter": "skip"}
    run = Run(store, tmp_path, **changes)
    run.trainer._spared.silent = frozenset("v")
    run.step(store.batch())
    rows = run.close()
    agrees(run)
    found = {key: [rows[f"{key}_{i}_0"]["untrained"] for i in range(4)] for key in "uvw"}
    zero = "zero_advantage"
    assert found == {"u": [None] * 4, "v": ["no_signal"] * 4, "w": [None, None, zero, zero]}
    left = [rows["v_0_0"], rows["w_2_0"]]
    assert [(row["trained"], row["update"], row["old_log_probs"] is None) for row in left] == [
        (0, None, True),
        (0, None, False),
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_filter_that_leaves_nothing_says_so_and_goes_on(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    from tests.long.training.dapo_filter import BATCH
    from tests.long.training.filters_world import World, play

    class Solved(World):
        def right(self, position: int) -> float:
            return 1.0

    caplog.set_level(logging.WARNING)
    play(Solved("skip", is_async, 0, 2), 1)
    said = "step 1: none of 4 groups has a signal (4 all right, 0 all wrong, 0 with fewer than two valid conversations)"
    assert f"{said}, so that it teaches nothing; take harder rows, or end the run here" in caplog.text
    caplog.clear()
    world = play(Solved("refill", is_async, 0, 2), 1)
    metrics = world.buffer.metrics()
    assert metrics["rollout/filter/replaced"] == 10 * BATCH
    assert metrics["rollout/filter/no_signal"] == metrics["rollout/filter/groups"] == 11 * BATCH
    assert "rollout/filter/rollouts_per_signal" not in metrics
    assert len(world.buffer.take_evicted()) == 10 * BATCH  # which the checkpoint's file names
    assert "the most that a step replaces, and those that come now teach nothing; take harder rows" in caplog.text


def test_a_group_is_all_right_by_its_accuracies_else_by_the_rewards_so_far(store: WritableStore) -> None:
    from verl_multiturn.rows.reward_numbers import ScoreRange
    from verl_multiturn.verl_bridge.trainer.groups.signal_filter import SignalFilter

    for uid, scores, acc in (("u", [0.3, 0.1 + 0.2], None), ("v", [0.9, 0.9], None), ("w", [0.2, 0.2], 1.0),
                             ("x", [0.0, 1.0], None)):  # fmt: skip
        add(store, uid, list(scores))
        for number in (0, 1):
            reported = store.rows[f"{uid}_{number}_0"]["metrics"]["rollout"]["reported"]
            reported.clear()
            reported |= {} if acc is None else {"acc": acc}
    found = SignalFilter("skip", 4, 2)
    found.judge(store.batch(), ["u", "v", "w", "x"], 1)
    assert found.silent == {"u", "v", "w"}
    assert {name: found._counts[name] for name in ("no_signal", "all_right", "all_wrong")} == {
        "no_signal": 3, "all_right": 2, "all_wrong": 1,
    }  # fmt: skip
    kept = found.state()
    found.scores = ScoreRange()
    found.restore(kept)
    assert found.scores == ScoreRange(0.0, 1.0)


FILTER = "+actor_rollout_ref.rollout.custom.multiturn.filter"


def checked(**changes: str) -> Any:
    """Compose verl's configuration with changes, check its filter, and complete it as the start-up check does."""
    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.startup.refusals.filters import FILTERS, filters
    from verl_multiturn.verl_bridge.startup.setting_changes import complete
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    needed = {
        "actor_rollout_ref.rollout.name": "sglang_async",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "multiturn_agent",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": "4",
    }
    config = compose_config([f"{key}={value}" for key, value in (needed | changes).items()])
    run = RunView(config)
    check(run, [Section("", FILTERS, filters)])
    complete(run)
    return config


def test_what_is_derived() -> None:
    def found(mode: str, **data_keys: str) -> tuple[Any, Any, Any]:
        data = checked(**{FILTER: mode, **{f"data.{key}": value for key, value in data_keys.items()}}).data
        return data.get("gen_batch_size"), data.custom_cls.path, data.custom_cls.name

    assert found("off") == found("skip") == (None, None, None)
    assert found("refill") == (1, None, None)
    module = "pkg://verl_multiturn.verl_bridge.trainer.data_set"
    assert found("difficulty") == (1, module, "NumberedRows")
    # verl's filter of long prompts measures the text that the model gets, unless the user has a class of his own.
    assert found("off", filter_overlong_prompts="True") == (None, module, "MeasuredRows")
    assert found("difficulty", filter_overlong_prompts="True") == (1, module, "NumberedRows")


@pytest.mark.parametrize(
    ("mode", "changes", "said"),
    [
        ("skip", {"algorithm.filter_groups.enable": "True"}, "both would leave out groups; leave out one"),
        ("refill", {"algorithm.adv_estimator": "gae"}, "a group of equal rewards may have advantages other than 0"),
        ("skip", {"actor_rollout_ref.actor.use_kl_loss": "True"}, "use_kl_loss=True a row whose advantages are all 0"),
        (
            "skip",
            {"actor_rollout_ref.model.mtp.enable_train": "True"},
            "with actor_rollout_ref.model.mtp.enable_train=T",
        ),
        ("refill", {"algorithm.use_kl_in_reward": "True"}, "a KL penalty makes equal rewards different"),
        ("skip", {"actor_rollout_ref.rollout.n": "1"}, "there is only one; set rollout.n to 2"),
        ("difficulty", {"data.custom_cls.path": "a.py"}, "set .*filter=skip"),
        ("refill", {"trainer.use_v1": "False"}, "only verl's own V1 trainers take it"),
    ],
)
def test_what_is_refused(mode: str, changes: dict[str, str], said: str) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=said):
        checked(**{FILTER: mode}, **changes)


def test_rows_of_validation_have_no_position_though_they_may_be_those_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verl_multiturn.verl_bridge.trainer.data_set import POSITION, NumberedRows

    monkeypatch.setattr(NumberedRows.__base__, "__getitem__", lambda self, item: {"raw_prompt": []})
    training, validation = (NumberedRows.__new__(NumberedRows) for _ in range(2))
    training.is_numbered = True
    assert training[3] == {"raw_prompt": [], POSITION: 3}
    assert validation[3] == {"raw_prompt": []}


def test_rows_know_their_position_and_are_drawn_again() -> None:
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.tensordict_utils import get_tensordict

    from verl_multiturn.rollout.groups.difficulty import Pools
    from verl_multiturn.verl_bridge.trainer.data_set import POSITION, draw_prompt

    rows = [{"raw_prompt": [{"role": "user", "content": str(i)}], POSITION: i} for i in range(3)]
    given = iter([0, 1, 0, 1, 2])

    def fetch() -> Any:
        position = next(given)
        columns = collate_fn([rows[position]])
        columns["uid"] = collate_fn([{"uid": f"u{position}"}])["uid"]
        return get_tensordict(columns)

    pools = Pools(8)
    first, second = draw_prompt(pools, fetch, rows), draw_prompt(pools, fetch, rows)
    assert [list(each["uid"]) for each in (first, second)] == [["u0"], ["u1"]]
    assert POSITION not in first
    assert pools.drawn == {"u0": 0, "u1": 1}
    pools.judge("u0", 8, 8, False, 1)
    pools.judge("u1", 4, 8, True, 1)
    again = draw_prompt(pools, fetch, rows)
    assert next(iter(again["raw_prompt"])) == [{"role": "user", "content": "1"}]
    assert POSITION not in again
    assert (list(pools.drawn.values()), pools.drawn.keys() & {"u1"}) == ([1], set())
    assert list(draw_prompt(pools, fetch, rows)["uid"]) == ["u2"]  # row 0 was right, and row 1 is in a group
