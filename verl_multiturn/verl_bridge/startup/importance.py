"""The importance weight of an asynchronous run: decoupled PPO, equation 5 of AReaL (arXiv 2505.24298).

    J = E[ sum over t of  w_t * min(u_t * A_t, clip(u_t, 1 - eps, 1 + eps) * A_t) ]
    w_t = pi_prox / pi_behav,  u_t = pi_theta / pi_prox,  each for the sampled token t

pi_behav sampled the token, under an older version of the weights. pi_prox has the parameters of the step's start.
pi_theta is being trained. verl computes all of this already, but by default it leaves w_t out and limits u_t where
A_t < 0 ("dual clip").

Invariants:
- verl's defaults stand in every composed configuration, so a default is never taken for a user's wish;
- a value of the user's that the chosen weight contradicts is refused. It is never replaced in silence.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.config import PATH, ImportanceWeight
from verl_multiturn.errors import ConfigError

NEVER = 1e9
"""A limit that no ratio reaches: verl keeps the logarithm of each ratio within 20 of 0, and exp(20) is 4.9e8."""

_CORRECTION = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
LEVEL = f"{_CORRECTION}.rollout_is"

# By setting of verl: its default, and the value that the weight needs.
_Needs = dict[str, tuple[Any, Any]]
# Without these there is no weight, or no proximal policy.
_ALWAYS: _Needs = {
    f"{_CORRECTION}.bypass_mode": (False, False),
    "actor_rollout_ref.rollout.calculate_log_probs": (True, True),
}
# With these the loss is that of equation 5.
_EXACT: _Needs = {
    **_ALWAYS,
    LEVEL: (None, "token"),
    f"{_CORRECTION}.rollout_is_threshold": (2.0, NEVER),
    f"{_CORRECTION}.rollout_is_batch_normalize": (False, False),
    f"{_CORRECTION}.rollout_rs": (None, None),
    f"{_ACTOR}.clip_ratio_c": (3.0, NEVER),
    f"{_ACTOR}.policy_loss.loss_mode": ("vanilla", "vanilla"),
}


def derive_importance_weights(config: DictConfig, weight: ImportanceWeight, max_staleness: int | None) -> None:
    """Set verl's settings for the importance weight in place; do nothing in a run whose staleness is not bounded.

    Args:
        config: verl's whole configuration.
        weight: our setting `importance_weight`.
        max_staleness: our setting `max_staleness`; None: not set.

    Raises:
        ConfigError: a value of the user's contradicts the weight; the message names both values and the remedy.
    """
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if max_staleness is None or not mode.endswith("_async"):
        if weight == "truncated":
            raise ConfigError(
                f"{PATH}.importance_weight={weight!r}: expected an asynchronous trainer with {PATH}.max_staleness, got "
                f"trainer.v1.trainer_mode={mode!r} and max_staleness={max_staleness!r}; set both, or leave "
                "importance_weight out"
            )
        return
    if weight == "exact":
        _derive(config, _EXACT, weight)
    elif weight == "truncated":
        _derive(config, _ALWAYS, weight)
        _refuse_loss_without_weight(config)
        if OmegaConf.select(config, LEVEL) is None:
            OmegaConf.update(config, LEVEL, "token")


def _derive(config: DictConfig, needs: _Needs, weight: ImportanceWeight) -> None:
    """Set each setting to the value it needs, when all of them have that value or verl's default."""
    for key, (default, needed) in needs.items():
        given = OmegaConf.select(config, key)
        if given not in (default, needed):
            raise _contradiction(key, given, needed, weight)
    for key, (_, needed) in needs.items():
        OmegaConf.update(config, key, needed)


def _refuse_loss_without_weight(config: DictConfig) -> None:
    """Refuse the one policy loss of verl that ignores the weight."""
    key = f"{_ACTOR}.policy_loss.loss_mode"
    if (given := OmegaConf.select(config, key)) == "bypass_mode":
        raise _contradiction(key, given, "vanilla", "truncated")


def _contradiction(key: str, given: Any, needed: Any, weight: ImportanceWeight) -> ConfigError:
    other = "truncated" if weight == "exact" and key not in _ALWAYS and given != "bypass_mode" else "verl"
    return ConfigError(
        f"{key}={given!r}: {PATH}.importance_weight={weight!r} needs {needed!r} (decoupled PPO); leave {key} out, or "
        f"keep your value with {PATH}.importance_weight={other}"
    )
