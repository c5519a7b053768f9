"""Table of verl's values that settings of ours need: the start-up check compares them with a run's, and then sets them.

The composed configuration always holds verl's defaults, so that the user's own values cannot be recognised. So a
value is taken for the user's when it is neither verl's default nor the one that our settings need, and is refused
then: a wish of the user's is not replaced in silence.

The importance weight of an asynchronous run is decoupled PPO, equation 5 of AReaL (arXiv 2505.24298):

    J = E[ sum over t of  w_t * min(u_t * A_t, clip(u_t, 1 - eps, 1 + eps) * A_t) ]
    w_t = pi_prox / pi_behav,  u_t = pi_theta / pi_prox,  each for the sampled token t

pi_behav sampled the token, under an older version of the weights. pi_prox has the parameters of the step's start.
pi_theta is being trained. verl computes all of this already, but by default it leaves w_t out and limits u_t where
A_t < 0 ("dual clip").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_multiturn.old_names import name_of_today
from verl_multiturn.verl_bridge.names import MEASURED_ROWS, NUMBERED_ROWS, ROW_LOSS, TURN_LOSS
from verl_multiturn.verl_bridge.startup.table import RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

NEVER = 1e9
"""A limit that no ratio reaches: verl keeps the logarithm of each ratio within 20 of 0, and exp(20) is 4.9e8."""

Values = Mapping[str, tuple[Any, Any]]
"""By setting of verl: its default (`trainer/config/ppo_trainer.yaml` of verl 0.9.1), and the value that ours need."""

_CORRECTION = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
_LEVEL, _LOSS = f"{_CORRECTION}.rollout_is", f"{_ACTOR}.policy_loss.loss_mode"
_SAMPLER = "trainer.v1.sampler"
_DATA_CLASS = ("data.custom_cls.path", "data.custom_cls.name")

_WITHOUT_WEIGHT: Values = {
    f"{_CORRECTION}.bypass_mode": (False, False),
    "actor_rollout_ref.rollout.calculate_log_probs": (True, True),
}
"""Without these there is no weight, or no proximal policy."""

_EXACT: Values = {
    **_WITHOUT_WEIGHT,
    _LEVEL: (None, "token"),
    f"{_CORRECTION}.rollout_is_threshold": (2.0, NEVER),
    f"{_CORRECTION}.rollout_is_batch_normalize": (False, False),
    f"{_CORRECTION}.rollout_rs": (None, None),
    f"{_ACTOR}.clip_ratio_c": (3.0, NEVER),
    _LOSS: ("vanilla", "vanilla"),
}
"""With these the loss is that of equation 5."""


@dataclass(frozen=True)
class Need:
    """One value of verl's that a setting of ours needs."""

    values: Callable[[RunView], Values]
    """Return the values that a run needs."""
    keys: Sequence[str] = ()
    """The settings that are compared with the run's own; of the others `values` keeps the user's."""
    why: str = ""
    """Reason, as in a `RefusalRow`; it may name `{found[needed]}`, the value that is needed, and `{found[other]}`."""
    remedy: str = ""
    other: Callable[[RunView, str], str] = lambda run, key: ""
    """Return the value of our setting with which the user's value of a setting may stay."""

    def rows(self) -> list[RefusalRow]:
        """Return a row for each setting that a run may have with another value."""
        return [
            RefusalRow(key, lambda run, key=key: self._against(run, key), self.why, self.remedy)  # type: ignore[misc]
            for key in self.keys
        ]

    def _against(self, run: RunView, key: str) -> dict[str, Any] | None:
        values, given = self.values(run), run.value(key)
        today = name_of_today(given) if isinstance(given, str) else given  # the configuration of an older run
        if key not in values or today in values[key]:
            return None
        return {"needed": values[key][1], "other": self.other(run, key)}


def set_needs(run: RunView) -> None:
    """Set each setting of verl to the value that ours need; the checks have accepted the run's own."""
    values = {key: value for need in NEEDS for key, (_, value) in need.values(run).items()}
    with open_dict(run.config):
        for key, value in values.items():
            OmegaConf.update(run.config, key, value, force_add=True)


def is_default_warmup(given: Any) -> bool:
    """Return whether a number of warm-up batches is verl's default, the integer 1; 1.0 is the user's."""
    return type(given) is int and given == 1


def has_weight(run: RunView) -> bool:
    """Return whether the loss has an importance weight: verl's, or the one that ours needs."""
    return bool(run.value(_LEVEL) or WEIGHT.values(run))


def _of_weight(run: RunView) -> Values:
    """Return the values that the importance weight needs; empty in a run whose staleness is not bounded."""
    weight = run.settings.importance_weight
    if weight == "verl" or run.settings.max_staleness is None or not run.is_asynchronous:
        return {}
    if weight == "exact":
        return _EXACT
    # The user's level stays, and every loss but the one that ignores the weight.
    filled = [key for key, given in ((_LEVEL, None), (_LOSS, "bypass_mode")) if run.value(key) == given]
    return {**_WITHOUT_WEIGHT, **{key: _EXACT[key] for key in filled}}


def _of_staleness(run: RunView) -> Values:
    """Return the values for `max_staleness`; empty without it, and in `sync`, whose tokens all have the age 0."""
    eta, strategy = run.settings.max_staleness, run.settings.staleness_strategy
    if eta is None or run.our_trainer in (None, "sync"):
        return {}
    warmup = f"trainer.v1.{run.our_trainer}.num_warmup_batches"
    given = run.value(warmup)
    return {
        warmup: (1, eta if is_default_warmup(given) else given),  # `refusals/staleness.py` has the ones that may stay
        f"{_SAMPLER}.max_off_policy_threshold": (8, eta + 1),
        # Our replay buffer carries out the strategy. To verl it is `drop`, or one that drops nothing.
        f"{_SAMPLER}.max_off_policy_strategy": ("drop", "drop" if strategy == "drop" else "wait"),
    }


def _of_long_prompts(run: RunView) -> Values:
    """Return the values that verl's filter of long prompts needs, so that it measures the model's prompts.

    Empty without the filter, and with a data set class of the user's own.
    """
    if not run.value("data.filter_overlong_prompts") or run.value(_DATA_CLASS[0]):
        return {}
    return {key: (None, needed) for key, needed in zip(_DATA_CLASS, MEASURED_ROWS, strict=True)}


def _of_filter(run: RunView) -> Values:
    """Return the values that `custom.multiturn.filter` needs; empty with `off` and `skip`."""
    mode = run.settings.filter
    needs: dict[str, tuple[Any, Any]] = {}
    if mode in ("refill", "difficulty"):
        needs["data.gen_batch_size"] = (None, 1)  # prompts are drawn one by one
    if mode == "difficulty":
        for key, needed in zip(_DATA_CLASS, NUMBERED_ROWS, strict=True):
            needs[key] = (None, needed)
    return needs


def _of_ratios(run: RunView) -> Values:
    """Return the loss for ratios of whole conversations: with a row for each, `mt_gspo` is verl's `gspo`.

    So no setting of ours has to reach the workers that compute the loss. Empty with any other loss or level.
    """
    is_ours = run.settings.ratio_level == "conversation" and run.policy_loss == TURN_LOSS
    return {_LOSS: (TURN_LOSS, ROW_LOSS)} if is_ours else {}


def _other_weight(run: RunView, key: str) -> str:
    is_exact = run.settings.importance_weight == "exact"
    keeps = is_exact and key not in _WITHOUT_WEIGHT and run.value(key) != "bypass_mode"
    return "truncated" if keeps else "verl"


WEIGHT = Need(
    _of_weight,
    tuple(_EXACT),
    why="{PATH}.importance_weight={run.settings.importance_weight!r} needs {found[needed]!r} (decoupled PPO)",
    remedy="leave it out, or keep your value with {PATH}.importance_weight={found[other]}",
    other=_other_weight,
)
STALENESS = Need(
    _of_staleness,
    (f"{_SAMPLER}.max_off_policy_threshold", f"{_SAMPLER}.max_off_policy_strategy"),
    why="{PATH}.max_staleness={run.settings.max_staleness} makes it {found[needed]!r}",
    remedy="leave it out, or leave out max_staleness",
)
FILTER = Need(
    _of_filter,
    _DATA_CLASS,
    why="{PATH}.filter={run.settings.filter} makes it {found[needed]!r}",
    remedy="leave it out, or set {PATH}.filter=skip",
)
NEEDS = (WEIGHT, Need(_of_ratios), STALENESS, Need(_of_long_prompts), FILTER)
"""Where two need one setting, the last one decides."""
