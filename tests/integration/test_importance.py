"""The importance weight of an asynchronous run: derived, kept and refused values."""

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CORRECTION = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
VERLS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
}


def derived(weight: Any, *overrides: str, mode: str = "separate_async", max_staleness: int | None = 2) -> Any:
    """Return verl's composed configuration after the importance weight was derived."""
    from tests.trainer_config import compose_config
    from verl_multiturn.config import PATH
    from verl_multiturn.verl_bridge.startup.needs import set_needs
    from verl_multiturn.verl_bridge.startup.refusals.staleness import IMPORTANCE
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    eta = "null" if max_staleness is None else max_staleness
    ours = [f"+{PATH}.importance_weight={weight}", f"+{PATH}.max_staleness={eta}"]
    config = compose_config([f"trainer.v1.trainer_mode={mode}", *ours, *overrides])
    run = RunView(config)
    check(run, [Section("", IMPORTANCE)])
    set_needs(run)
    return config


def read(config: Any) -> tuple[dict[str, Any], float]:
    return dict(config.algorithm.rollout_correction), config.actor_rollout_ref.actor.clip_ratio_c


@pytest.mark.parametrize("mode", ["separate_async", "colocate_async"])
def test_the_default_is_equation_5(mode: str) -> None:
    exact = {**VERLS, "rollout_is": "token", "rollout_is_threshold": 1e9}
    assert read(derived("exact", mode=mode)) == (exact, 1e9)
    # A second start-up check, as of a resumed run's saved configuration, finds the values that it would derive.
    values = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=1e9", f"{ACTOR}.clip_ratio_c=1e9")
    assert read(derived("exact", *values, mode=mode)) == (exact, 1e9)


def test_the_truncated_weight_keeps_the_limits_of_verl_and_of_the_user() -> None:
    assert read(derived("truncated")) == ({**VERLS, "rollout_is": "token"}, 3.0)
    icepop = {**VERLS, "rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    values = (f"{CORRECTION}.rollout_is_threshold='0.5_5.0'", f"{ACTOR}.clip_ratio_c=10")
    assert read(derived("truncated", *values)) == (icepop, 10)
    sequence = (f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=True")
    found, _ = read(derived("truncated", *sequence))
    assert found == {**VERLS, "rollout_is": "sequence", "rollout_is_batch_normalize": True}


@pytest.mark.parametrize(
    "arguments",
    [{"weight": "verl"}, {"weight": "exact", "mode": "sync"}, {"weight": "exact", "max_staleness": None}],
)
def test_verls_settings_are_left_alone(arguments: Any) -> None:
    assert read(derived(**arguments)) == (VERLS, 3.0)
    weight = arguments.pop("weight")
    bypass = derived(weight, f"{CORRECTION}.bypass_mode=True", f"{ACTOR}.clip_ratio_c=5", **arguments)
    assert read(bypass) == ({**VERLS, "bypass_mode": True}, 5)


@pytest.mark.parametrize(
    ("weight", "override", "needed", "other"),
    [
        ("exact", f"{CORRECTION}.bypass_mode=True", "False", "verl"),
        ("truncated", f"{CORRECTION}.bypass_mode=True", "False", "verl"),
        ("exact", "actor_rollout_ref.rollout.calculate_log_probs=False", "True", "verl"),
        ("truncated", "actor_rollout_ref.rollout.calculate_log_probs=False", "True", "verl"),
        ("exact", f"{CORRECTION}.rollout_is='sequence'", "'token'", "truncated"),
        ("exact", f"{CORRECTION}.rollout_is_threshold=5.0", "1000000000.0", "truncated"),
        ("exact", f"{CORRECTION}.rollout_is_batch_normalize=True", "False", "truncated"),
        ("exact", f"{CORRECTION}.rollout_rs='token_k1'", "None", "truncated"),
        ("exact", f"{ACTOR}.clip_ratio_c=10.0", "1000000000.0", "truncated"),
        ("exact", f"{ACTOR}.policy_loss.loss_mode='gspo'", "'vanilla'", "truncated"),
        ("exact", f"{ACTOR}.policy_loss.loss_mode='bypass_mode'", "'vanilla'", "verl"),
        ("truncated", f"{ACTOR}.policy_loss.loss_mode='bypass_mode'", "'vanilla'", "verl"),
    ],
)
def test_a_value_that_the_weight_contradicts_is_refused(weight: str, override: str, needed: str, other: str) -> None:
    from verl_multiturn import ConfigError

    # Both values by repr, and the remedy, which then works.
    told = f"{override}: actor_rollout_ref.rollout.custom.multiturn.importance_weight={weight!r} needs {needed} "
    with pytest.raises(ConfigError, match=re.escape(told)) as raised:
        derived(weight, override)
    assert str(raised.value).endswith(f"importance_weight={other}")
    derived(other, override)


@pytest.mark.parametrize("arguments", [{"mode": "sync"}, {"max_staleness": None}])
def test_a_truncated_weight_without_its_run_is_refused(arguments: Any) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match="importance_weight='truncated': expected an asynchronous trainer"):
        derived("truncated", **arguments)
