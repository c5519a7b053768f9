"""Settings of a part that is off in a run, mostly of verl: each such part has one line, which names the switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_multiturn.chat.tir import TIR
from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.names import EVALUATE_CHECKPOINTS
from verl_multiturn.verl_bridge.startup.needs import has_weight
from verl_multiturn.verl_bridge.startup.table import RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_UNDISCOUNTED = (
    "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline",
    "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized", "tir_optimal_token_baseline",
)  # fmt: skip
"""verl's estimators that read neither `algorithm.gamma` nor `algorithm.lam`; one of the user's own may."""
_CALLBACK = "trainer.checkpoint_callback_class"
_TEACHER = "distillation.teacher_models.teacher_model.model_path"
_TIR_STOP = f"{PATH}.tir.stop"
_EVALUATION = f"{PATH}.checkpoint_evaluation"
_COUNTERPARTS = {"critic.model": _MODEL, "critic.fsdp": f"{_ACTOR}.fsdp_config", "critic": _ACTOR}


def _off(patterns: str, switch: str, is_off: Callable[[RunView], Any]) -> RefusalRow:
    """Return the row of a part that is off: it names all settings of the part that are not defaults."""

    def found(run: RunView) -> str:
        if not is_off(run):
            return ""
        changed = (key for pattern in patterns.split() for key in run.changed(pattern))
        keys = dict.fromkeys(key for key in changed if key != switch and not _is_as_the_actors(run, key))
        return ", ".join(f"{key}={run.value(key)!r}" for key in keys)

    key = ", ".join(patterns.split())
    return RefusalRow(
        key, found, f"this has no effect without {switch}", "leave it out", given="{found}", is_refusal=False
    )


def _is_as_the_actors(run: RunView, key: str) -> bool:
    """Return whether a critic's setting equals the actor's: recipes set both, for the runs that have a critic."""
    for critic, actor in _COUNTERPARTS.items():
        if key.startswith(critic):
            return bool(run.value(key) == run.value(actor + key.removeprefix(critic)))
    return False


def _off_without(patterns: str, switch: str) -> RefusalRow:
    return _off(patterns, switch, lambda run: not run.value(switch))


def _without_adapters(run: RunView) -> bool:
    return not any(run.value(f"{_MODEL}.{name}") for name in ("lora_rank", "lora_adapter_path", "lora.rank"))


def _of_loss(patterns: str, mode: str) -> RefusalRow:
    key = f"{_ACTOR}.policy_loss.loss_mode"
    return _off(patterns, f"{key}={mode}", lambda run: run.value(key) != mode)


def _of_mode(mode: str) -> RefusalRow:
    key = "trainer.v1.trainer_mode"
    return _off(f"trainer.v1.{mode}.*", f"{key}={mode}", lambda run: not str(run.value(key)).endswith(mode))


PARTS_OFF = [
    _off("critic.*", "critic.enable", lambda run: not run.has_critic),
    _off_without("reward.reward_model.*", "reward.reward_model.enable"),
    _off_without("reward_model.model.* reward_model.rollout.*", "reward_model.enable"),
    _off_without("distillation.*", "distillation.enabled"),
    _off_without(
        "global_profiler.tool global_profiler.global_tool_config.* *.profiler.enable *.profiler.*ranks "
        "*.profiler.tool_config.*",
        "global_profiler.steps",
    ),
    _off_without(f"{_ACTOR}.kl_loss_*", f"{_ACTOR}.use_kl_loss"),
    _off_without("algorithm.kl_ctrl.* algorithm.kl_penalty", "algorithm.use_kl_in_reward"),
    _off(
        "algorithm.gamma",
        "algorithm.adv_estimator=gae or reinforce_plus_plus",
        lambda run: run.estimator in _UNDISCOUNTED,
    ),
    _off(
        "algorithm.lam",
        "algorithm.adv_estimator=gae",
        lambda run: run.counts_conversations or run.estimator in (*_UNDISCOUNTED, "reinforce_plus_plus"),
    ),
    _off(
        "algorithm.norm_adv_by_std_in_grpo",
        "an estimator that reads it, such as mt_grpo",
        lambda run: run.counts_conversations and run.estimator != "mt_grpo",
    ),
    _off(
        f"{_CORRECTION}.rollout_is_threshold {_CORRECTION}.rollout_is_batch_normalize",
        f"{_CORRECTION}.rollout_is",
        lambda run: not has_weight(run),
    ),
    _off_without(f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs"),
    _off(
        f"{_MODEL}.lora_alpha {_MODEL}.target_modules {_MODEL}.target_parameters {_MODEL}.exclude_modules",
        f"{_MODEL}.lora_rank",
        _without_adapters,
    ),
    _of_loss(f"{_ACTOR}.policy_loss.clip_cov_*", "clip_cov"),
    _of_loss(f"{_ACTOR}.policy_loss.kl_cov_ratio {_ACTOR}.policy_loss.ppo_kl_coef", "kl_cov"),
    _of_loss(f"{_ACTOR}.policy_loss.dro_beta", "dro"),
    _of_loss(f"{_ACTOR}.tau_*", "sapo"),
    _of_mode("colocate_async"),
    _of_mode("separate_async"),
    _off_without(
        "trainer.v1.separate_async.hybrid_rollout.*", "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    ),
    _off_without("algorithm.filter_groups.*", "algorithm.filter_groups.enable"),
    _off_without(f"{_MODEL}.mtp.*", f"{_MODEL}.mtp.enable"),
    _off_without(f"{_MODEL}.tiled_mlp.*", f"{_MODEL}.tiled_mlp.enabled"),
    _off_without(f"{_MODEL}.fused_kernel_options.*", f"{_MODEL}.use_fused_kernels"),
    _off_without(f"{_ACTOR}.fsdp_config.qat.*", f"{_ACTOR}.fsdp_config.qat.enable"),
    _off_without(f"{_ACTOR}.megatron.qat.*", f"{_ACTOR}.megatron.qat.enable"),
    _off(
        "*.turbo_config.*",
        f"{_ACTOR}.strategy=fsdp_turbo",
        lambda run: run.value(f"{_ACTOR}.strategy") != "fsdp_turbo",
    ),
    _off_without(f"{_ROLLOUT}.trace.*", f"{_ROLLOUT}.trace.backend"),
    _off_without(f"{_ROLLOUT}.prometheus.*", f"{_ROLLOUT}.prometheus.enable"),
    _off_without(f"{_ROLLOUT}.disaggregation.*", f"{_ROLLOUT}.disaggregation.enabled"),
    _off_without("skip.rollout_tq.*", "skip.rollout_tq.enable"),
    RefusalRow(
        _TEACHER,
        when=lambda run: run.is_set(_TEACHER) and run.teachers and "teacher_model" not in run.teachers,
        why="this has no effect: verl leaves the entry teacher_model out where there are others",
        remedy="give it another name, a key and num_replicas, or leave it out",
        is_refusal=False,
    ),
    RefusalRow(
        _TIR_STOP,
        when=lambda run: run.is_set(_TIR_STOP) and not run.is_text_mode,
        why=f"this has no effect without {_ROLLOUT}.multi_turn.format={TIR}",
        remedy="leave it out",
        is_refusal=False,
    ),
    RefusalRow(
        _EVALUATION,
        when=lambda run: run.is_set(_EVALUATION) and run.value(_CALLBACK) != EVALUATE_CHECKPOINTS,
        why=f"this has no effect without {_CALLBACK}={EVALUATE_CHECKPOINTS}",
        remedy="leave it out",
        given=_EVALUATION,
        is_refusal=False,
    ),
]
