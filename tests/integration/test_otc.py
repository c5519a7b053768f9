"""The OTC reward within verl: from rows that our agent loop writes to the advantages that verl computes from them."""

from typing import Any

import pytest

from tests.integration import trainer_rows
from tests.integration.trainer_rows import CALL, Store, WritableStore, make_output

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

HALF_ROOT_3 = 0.8660254
BAD_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"wrong": 1}}\n</tool_call><|im_end|>'


def add(store: Store, uid: str, session: int, calls: int | list[str], score: float, **reported: float) -> None:
    """Add a conversation with calls (their number, or the turns with them) and the result of `compute_score`."""
    turns = calls if isinstance(calls, list) else [CALL] * calls
    output = make_output(uid, session, [*turns, "2<|im_end|>"])
    output.reward_score = score
    output.extra_fields["reward_extra_info"] = {"score": score, **reported}
    store.add(uid, session, output)


def make_trainer(**otc: Any) -> Any:
    """Make a trainer that scales the scores of its batches, and lets verl compute advantages from them."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_multiturn.config import OtcSettings
    from verl_multiturn.verl_bridge.trainer.rows.otc import OtcScores

    algorithm = {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    algorithm["norm_adv_by_std_in_grpo"] = False

    class Trainer:
        config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
        scores = OtcScores(OtcSettings(**otc))
        _compute_advantage = PPOTrainer._compute_advantage

    return Trainer()


def step(trainer: Any, *batches: Any) -> dict[str, float]:
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    trainer.scores.begin_step()
    for batch in batches:
        trainer.scores.scale(BatchRows(batch))
        trainer._compute_advantage(batch, {})
    metrics: dict[str, float] = trainer.scores.metrics()
    return metrics


def test_a_group_compared_with_its_fewest_calls(store: WritableStore) -> None:
    add(store, "u", 0, 1, 1.0, acc=1.0)
    add(store, "u", 1, 2, 1.0, acc=1.0)
    add(store, "u", 2, 2, 0.0, acc=0.0)
    add(store, "u", 3, 0, 0.1, acc=0.0)  # wrong, but rewarded for its format
    metrics = step(make_trainer(form="grpo"), store.batch())
    assert store.scores() == {
        "u_0_0": [1.0],
        "u_1_0": [pytest.approx(HALF_ROOT_3)],
        "u_2_0": [],
        "u_3_0": [pytest.approx(0.1)],
    }
    # The scores less their mean, 0.4915064.
    advantages = [store.advantage(f"u_{session}_0") for session in range(4)]
    assert advantages == pytest.approx([0.5084936, 0.3745190, -0.4915064, -0.3915064])
    assert metrics == {"rollout/otc/r_tool/mean": pytest.approx((1 + HALF_ROOT_3) / 2)}


def test_each_conversation_by_itself(store: WritableStore) -> None:
    add(store, "u", 0, 0, 1.0)
    add(store, "u", 1, 1, 1.0)
    add(store, "v", 0, 1, 0.8)
    # The first call was not executed.
    add(store, "v", 1, [BAD_CALL, CALL], 0.8)
    metrics = step(make_trainer(form="ppo", c=1.0, alpha=2.0), store.batch())
    # One call has the factor cos(π/3) = 0.5.
    assert store.scores() == {
        "u_0_0": [2.0],
        "u_1_0": [1.0],
        "v_0_0": [pytest.approx(0.8)],
        "v_1_0": [pytest.approx(0.8)],
    }
    assert [store.advantage(key) for key in store.rows] == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert metrics == {"rollout/otc/r_tool/mean": pytest.approx(0.625)}


def test_groups_are_apart_and_updates_of_a_step_are_counted_together(store: WritableStore) -> None:
    for uid, calls in (("u", (0, 1)), ("v", (1, 1)), ("w", (2, 2))):
        for session in (0, 1):
            add(store, uid, session, calls[session], 1.0 if uid != "w" else 0.0)
    keys = list(store.rows)
    halves = [store.batch(keys[:2]), store.batch(keys[2:])]
    metrics = step(make_trainer(form="grpo", c=1.0), *halves)
    # In u, one conversation needed no call; in v, both needed one; in w, none was right.
    assert [sum(scores) for scores in store.scores().values()] == pytest.approx([1.0, 0.5, 1.0, 1.0, 0.0, 0.0])
    assert metrics == {"rollout/otc/r_tool/mean": pytest.approx(3.5 / 4)}


def test_other_rows_stay_as_they_are(store: WritableStore) -> None:
    for session in range(2):
        add(store, "u", session, 1, 1.0)
    # Nothing was sampled, so this is not an answer without a call.
    empty = make_output("u", 2, [])
    empty.reward_score = 1.0
    store.add("u", 2, empty)
    for key in ("other_0_0", "bare_0_0", "pad1_0_0"):
        store.rows[key] = {**store.rows["u_1_0"], "uid": key.split("_")[0]}
        store.tags[key] = {**store.tags["u_1_0"], "is_padding": key.startswith("pad")}
    store.rows["other_0_0"]["metrics"] = {"generate_sequences": 0.5}
    del store.rows["bare_0_0"]["metrics"]
    trainer = make_trainer(form="ppo", c=1.0)
    step(trainer, store.batch())
    assert [sum(scores) for scores in store.scores().values()] == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    step(make_trainer(form="grpo"), store.batch())
    assert sum(store.scores()["u_2_0"]) == 1.0
    # A batch in which no answer was right, then one without rows of ours.
    for key in ("u_0_0", "u_1_0", "u_2_0"):
        del store.rows[key], store.tags[key]
    assert step(trainer, store.batch()) == {}


def test_what_the_tools_gave_stays(store: WritableStore) -> None:
    output = make_output("u", 0, [CALL, "2<|im_end|>"])
    output.reward_score, output.stats["tool_score"] = 1.0, 0.75
    last = len(output.response_ids) - 1
    output.turn_rewards = [(3, 0.25), (last, 0.5)]
    store.add("u", 0, output)
    step(make_trainer(form="ppo", c=1.0), store.batch())
    assert store.scores() == {"u_0_0": [0.25, 1.0]}


def test_off_it_touches_nothing(store: WritableStore) -> None:
    add(store, "u", 0, 1, 1.0)
    add(store, "u", 1, 0, 0.0)
    assert step(make_trainer(), store.batch()) == {}
    assert store.scores() == {"u_0_0": [1.0], "u_1_0": []}


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_trainer_scales_before_it_computes_advantages_and_verifies(store: WritableStore, mode: str) -> None:
    for session, calls in enumerate((1, 2)):
        add(store, "u", session, calls, 1.0)
    settings = {"actor_rollout_ref__rollout__custom__multiturn__otc": {"form": "grpo"}}
    trainer = trainer_rows.make_trainer(mode, algorithm__norm_adv_by_std_in_grpo=False, **settings)
    metrics = trainer_rows.step(trainer, store.batch())
    half = (1 - HALF_ROOT_3) / 2
    assert [store.advantage(key) for key in store.rows] == pytest.approx([half, -half], abs=1e-6)
    assert metrics["rollout/otc/r_tool/mean"] == pytest.approx(1 - half)
    assert metrics["rollout/certificate/rows"] == 2
    for row in store.rows.values():
        row["advantages"] = row["advantages"] * float("nan")
    assert trainer_rows.step(trainer, store.batch())["rollout/certificate/violations"] == 0  # it verifies its own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer.use_v1": "False"},
            r"otc.form='grpo': only verl's own V1 trainers take it, got trainer.use_v1=False",
        ),
        ({"trainer.v1.trainer_mode": "mine"}, "trainer.v1.trainer_mode='mine'; use one of them"),
        (
            {"custom.multiturn.tool_reward.mode": "replace"},
            "which tool_reward.mode=replace does not call; set the mode",
        ),
        ({"reward.reward_model.enable": "True"}, "scores of reward.reward_model without a resource pool"),
        ({"actor_rollout_ref.rollout.n": "1"}, "actor_rollout_ref.rollout.n=1; set n to 2 or more"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    given = {"custom.multiturn.otc.form": "grpo", "actor_rollout_ref.rollout.n": "4", **changes}
    ours = {f"+actor_rollout_ref.rollout.{key}": value for key, value in given.items() if key.startswith("custom.")}
    others = {key: value for key, value in given.items() if not key.startswith("custom.")}
    with pytest.raises(ConfigError, match=message):
        configuration.prepare_config(composed(**{**ours, **others, "ray_kwargs.ray_init.num_cpus": "64"}))


def test_a_single_answer_can_be_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    given = {"+actor_rollout_ref.rollout.custom.multiturn.otc.form": "ppo", "actor_rollout_ref.rollout.n": "1"}
    configuration.prepare_config(composed(**{**given, "ray_kwargs.ray_init.num_cpus": "64"}))
