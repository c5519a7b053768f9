"""The start-up check derives verl's settings from `max_staleness`, and refuses settings that contradict it."""

import re
from typing import Any

import pytest

pytestmark = pytest.mark.stack

ETA = "+actor_rollout_ref.rollout.custom.multiturn.max_staleness"
STRATEGY = "+actor_rollout_ref.rollout.custom.multiturn.staleness_strategy"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": "2",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "data.train_batch_size": "8",
    BACKEND: "nccl",
}
COLOCATED = {"trainer.v1.trainer_mode": "colocate_async"}


def checked(**changes: str) -> Any:
    """Compose verl's configuration with changes, and check it as the start-up check does."""
    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.startup.refusals.staleness import IMPORTANCE, SERVERS_APART, STALENESS
    from verl_multiturn.verl_bridge.startup.setting_changes import complete
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    settings = {"actor_rollout_ref.rollout.name": "sglang_async", loop: "multiturn_agent", **changes}
    config = compose_config([f"{key}={value}" for key, value in settings.items()])
    run = RunView(config)
    check(run, [Section("", [*SERVERS_APART, *IMPORTANCE, *STALENESS])])
    complete(run)
    return config


def derived(config: Any, mode: str) -> tuple[Any, Any, Any]:
    sampler = config.trainer.v1.sampler
    warmup = config.trainer.v1[mode].num_warmup_batches
    return warmup, sampler.max_off_policy_threshold, sampler.max_off_policy_strategy


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_verls_settings_are_derived(mode: str) -> None:
    changes = SEPARATE if mode == "separate_async" else COLOCATED
    assert derived(checked(**changes), mode) == (1, 8, "drop")  # verl's defaults, which stay without the setting
    assert derived(checked(**changes, **{ETA: "3"}), mode) == (3, 4, "wait")
    assert derived(checked(**changes, **{ETA: "0", STRATEGY: "drop"}), mode) == (0, 1, "drop")
    assert derived(checked(**changes, **{ETA: "2", STRATEGY: "wait"}), mode) == (2, 3, "wait")


def test_the_derived_values_may_be_written_out() -> None:
    written = {
        "trainer.v1.colocate_async.num_warmup_batches": "3",
        "trainer.v1.sampler.max_off_policy_threshold": "4",
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }
    assert derived(checked(**COLOCATED, **written, **{ETA: "3"}), "colocate_async") == (3, 4, "wait")


@pytest.mark.parametrize(("written", "number"), [("0", 0), ("0.5", 0.5), ("1.0", 1.0), ("2", 2), ("3", 3), ("1", 3)])
def test_any_number_of_warm_up_batches_within_the_bound_is_kept(written: str, number: float) -> None:
    """Verl's default, the integer 1, cannot be distinguished from a user's: it becomes the bound."""
    config = checked(**COLOCATED, **{ETA: "3", "trainer.v1.colocate_async.num_warmup_batches": written})
    assert derived(config, "colocate_async") == (number, 4, "wait")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            (
                {**COLOCATED, ETA: eta, "trainer.v1.colocate_async.num_warmup_batches": written},
                f"trainer.v1.colocate_async.num_warmup_batches={shown}: expected a number of batches from 0 to "
                f"actor_rollout_ref.rollout.custom.multiturn.max_staleness={eta}, for example 0.5; leave it out",
            )
            for eta, written, shown in [("3", "3.5", "3.5"), ("3", "-1", "-1"), ("0", "1.0", "1.0"), ("3", "a", "'a'")]
        ),
        (
            {**COLOCATED, ETA: "3", "trainer.v1.sampler.max_off_policy_threshold": "3"},
            "trainer.v1.sampler.max_off_policy_threshold=3: actor_rollout_ref.rollout.custom.multiturn."
            "max_staleness=3 makes it 4",
        ),
        (
            {**COLOCATED, ETA: "3", "trainer.v1.sampler.max_off_policy_threshold": "null"},
            "trainer.v1.sampler.max_off_policy_threshold=None: ",
        ),
        (
            {**COLOCATED, ETA: "3", STRATEGY: "drop", "trainer.v1.sampler.max_off_policy_strategy": "wait"},
            "trainer.v1.sampler.max_off_policy_strategy='wait': actor_rollout_ref.rollout.custom.multiturn."
            "max_staleness=3 makes it 'drop'",
        ),
        (
            {ETA: "1"},
            "max_staleness=1: the trainer 'sync' trains only tokens of the age 0; set trainer.v1.trainer_mode",
        ),
        (
            {**COLOCATED, ETA: "1", "trainer.use_v1": "False"},
            "max_staleness=1: only verl's own V1 trainers take it, got trainer.use_v1=False and",
        ),
        (
            {ETA: "0", "trainer.v1.trainer_mode": "mine"},
            "got trainer.use_v1=True and trainer.v1.trainer_mode='mine'; use one of them, or leave max_staleness out",
        ),
        (
            {**COLOCATED, ETA: "1", "actor_rollout_ref.rollout.name": "sglang"},
            "actor_rollout_ref.rollout.name='sglang' does not say under which weights each token was sampled; set "
            "actor_rollout_ref.rollout.name=sglang_async",
        ),
        (
            {
                **COLOCATED,
                ETA: "1",
                "trainer.v1.sampler.custom_sampler.path": "mine.py",
                "trainer.v1.sampler.custom_sampler.name": "Mine",
            },
            "trainer.v1.sampler.custom_sampler.name='Mine' chooses the groups itself",
        ),
        (
            {**COLOCATED, ETA: "1", "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "my.Manager"},
            "staleness_strategy='reroll': it cancels groups, which actor_rollout_ref.rollout.agent.",
        ),
        (
            {**COLOCATED, STRATEGY: "drop"},
            "strategy='drop': it has no effect without actor_rollout_ref.rollout.custom.multiturn.max_staleness",
        ),
        ({**SEPARATE, BACKEND: "naive"}, f"{BACKEND}='naive': it copies weights within one process"),
    ],
)
def test_what_contradicts_is_refused(changes: dict[str, str], message: str) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=re.escape(message)):
        checked(**changes)


def test_sync_takes_the_age_0() -> None:
    config = checked(**{ETA: "0"})
    assert config.trainer.v1.sampler.max_off_policy_threshold == 8


def test_the_whole_check_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    with pytest.raises(ConfigError, match="max_staleness=2: the trainer 'sync' trains only tokens of the age 0"):
        configuration.prepare_config(composed(**{ETA: "2"}))
    with pytest.raises(ConfigError, match=r"max_staleness: Input should be a valid integer, got 1\.5"):
        configuration.prepare_config(composed(**{ETA: "1.5"}))


@pytest.mark.parametrize("changes", [{ETA: "1"}, {"actor_rollout_ref.rollout.over_sample_rate": "0.25"}])
def test_nothing_is_ignored_in_a_run_of_verls_loops(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    verls = {"actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent", **COLOCATED, **changes}
    key = next(iter(changes)).lstrip("+")
    with pytest.raises(
        ConfigError, match=re.escape(key) + r"=\S+: it has no effect, since no row is known to use the agent"
    ):
        configuration.prepare_config(composed(**verls))
