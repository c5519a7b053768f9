"""Settings of verl 0.9.1 with no effect, or a wrong one, with its V1 trainer and SGLang.

All that apply to a run are in one message. `verl_keys.tsv` has the code that reads each of verl's settings, and the
reason and the remedy where they are the same for every run. Here are those that depend on the run. A test looks that
each setting that the table calls unread has a reason there, or a row here or among the other refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup import verl_keys
from verl_multiturn.verl_bridge.startup.refusals.parts_off import PARTS_OFF
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.verl_keys import REFUSE, TELL
from verl_multiturn.verl_bridge.startup.view import RunView

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_UNREAD = "nothing reads it"
_SWITCH = f"{PATH}.silent_settings"

When = Callable[[RunView], Any]


def _always(run: RunView) -> bool:
    return True


def _rows(
    keys: str | Iterable[str], why: str, remedy: str, refused: bool = False, when: When = _always
) -> list[RefusalRow]:
    """Return a row for each setting that must keep verl's default where `when` one reason holds for a run."""

    def row(key: str) -> RefusalRow:
        return RefusalRow(key, lambda run: when(run) and run.is_changed(key), why, remedy, is_refusal=refused)

    return [row(key) for key in ([keys] if isinstance(keys, str) else keys)]


def _with_critic(run: RunView) -> bool:
    return run.has_critic


def _without_megatron(run: RunView) -> bool:
    return not run.is_megatron


# Settings that would change the training.


def _ignored_clip_ratio(run: RunView) -> bool:
    ratio, *used = (run.value(f"{_ACTOR}.clip_ratio{end}") for end in ("", "_low", "_high"))
    return run.is_changed(f"{_ACTOR}.clip_ratio") and ratio not in used and None not in used


def _ignored_clip(model: str) -> When:
    """Return whether the clip of gradients that the engine takes is another one."""
    return lambda run: (
        (model == _ACTOR or run.has_critic) and run.value(f"{model}.grad_clip") != run.value(f"{model}.optim.clip_grad")
    )


_CLIP_LENGTHS = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")


def _ignored_lengths(key: str) -> When:
    taken = "critic.ppo_infer_max_token_len_per_gpu"
    return lambda run: (
        run.has_critic
        and run.value("critic.use_dynamic_bsz")
        and run.is_changed(key)
        and run.value(key) != (run.value(taken) or 32768)
    )


_TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_MEGATRON_LORA = (
    "type", "rank", "alpha", "dropout", "target_modules", "exclude_modules", "dropout_position", "lora_A_init_method",
    "lora_B_init_method", "a2a_experimental", "dtype", "adapter_path", "freeze_vision_model",
    "freeze_vision_projection", "freeze_language_model",
)  # fmt: skip
_FSDP_LORA = ("lora_rank", "lora_alpha", "exclude_modules", "lora_adapter_path")

_LEARNING = [
    RefusalRow(
        f"{_ACTOR}.clip_ratio",
        when=_ignored_clip_ratio,
        why="actor.clip_ratio_low and actor.clip_ratio_high hold, each with a default of its own",
        remedy="set those two",
    ),
    *_rows(f"{_ACTOR}.grad_clip", _UNREAD, "set actor.optim.clip_grad", refused=True, when=_ignored_clip(_ACTOR)),
    *_rows("critic.grad_clip", _UNREAD, "set critic.optim.clip_grad", refused=True, when=_ignored_clip("critic")),
    *_rows(
        f"{_ROLLOUT}.repetition_penalty",
        "each request is sent with 1.0",
        "leave it out: no setting changes it",
        refused=True,
    ),
    RefusalRow(
        "algorithm.adv_estimator",
        when=lambda run: run.estimator in _TOKEN_BASELINES,
        why="it needs the sum of squared probabilities, which verl's V1 trainer never asks the engine for",
        remedy="choose another estimator",
    ),
    *_rows(
        [f"{_MODEL}.lora.{name}" for name in _MEGATRON_LORA],
        "only Megatron reads it; FSDP takes model.lora_rank, and without that trains the whole model",
        "set model.lora_rank, lora_alpha, target_modules, exclude_modules and lora_adapter_path",
        refused=True,
        when=lambda run: run.is_fsdp and not run.value(f"{_MODEL}.lora_rank"),
    ),
    *_rows(
        [f"{_MODEL}.{name}" for name in _FSDP_LORA],
        "only FSDP reads it; Megatron takes model.lora.rank, and without that trains the whole model",
        "set model.lora.rank and what stands beside it",
        refused=True,
        when=lambda run: run.is_megatron and not run.value(f"{_MODEL}.lora.rank"),
    ),
    *_rows(
        f"{_MODEL}.lora_adapter_path",
        "FSDP makes an adapter only where model.lora_rank is above 0, and trains the whole model",
        "set model.lora_rank to the adapter's rank",
        refused=True,
        when=lambda run: run.is_fsdp and not run.value(f"{_MODEL}.lora_rank"),
    ),
    *_rows(
        f"{_ACTOR}.checkpoint.async_save",
        "only Megatron saves in the background and then writes latest_checkpointed_iteration.txt; without that file "
        "trainer.resume_mode=auto begins from scratch",
        "leave it out",
        refused=True,
        when=_without_megatron,
    ),
]

# Settings that would change speed, memory or kept data.

_FSDP_SECTIONS: Mapping[str, When] = {
    f"{_ACTOR}.fsdp_config": _always,
    f"{_REF}.fsdp_config": _always,
    "critic.fsdp": _with_critic,
}
"""Sections of FSDP's engine, and whether a run has the model."""


def _rows_of_strategy(strategy: str, names: Iterable[str], why: str) -> Iterator[RefusalRow]:
    """Yield a row for each setting that the engine of one `strategy` does not read."""
    for section, is_there in _FSDP_SECTIONS.items():
        keys = [f"{section}.{name}" for name in names]

        def applies(run: RunView, is_there: When = is_there) -> bool:
            return bool(is_there(run) and run.value(f"{_ACTOR}.strategy") == strategy)

        yield from _rows(keys, why, "leave it out", when=applies)


def _has_sglang(run: RunView, section: str, engine: str) -> bool:
    is_on = run.value(f"{section}.enable") or run.value(f"{section}.enabled")
    return bool(is_on) and str(run.value(f"{section}.{engine}.name")).startswith("sglang")


def _changed_of_teachers(name: str) -> When:
    """Return the settings of that name that teachers on SGLang have changed, with their values, as a text."""

    def changed(run: RunView) -> str:
        sections = [f"{_TEACHERS}.{teacher}.inference" for teacher in run.teachers]
        keys = [f"{each}.{name}" for each in sections if str(run.value(f"{each}.name")).startswith("sglang")]
        return ", ".join(f"{key}={run.value(key)!r}" for key in keys if run.is_changed(key))

    return changed


_OTHER_SECTIONS: Mapping[str, When] = {
    "reward.reward_model.rollout": lambda run: _has_sglang(run, "reward.reward_model", "rollout"),
    "reward_model.rollout": lambda run: _has_sglang(run, "reward_model", "rollout"),
}
"""Sections of the engines of reward models, and whether a run has one."""

_TEACHERS = "distillation.teacher_models"

_OTHER_ENGINES: Mapping[str, str] = {
    "enable_prefix_caching": "disable_radix_cache",
    "enable_chunked_prefill": "chunked_prefill_size (-1: off)",
    "max_num_batched_tokens": "max_prefill_tokens",
    "cudagraph_capture_sizes": "cuda_graph_bs",
    "scheduling_policy": "schedule_policy",
    "seed": "random_seed",
    "logprobs_mode": "",
    "limit_images": "",
    "quantization_config_file": "",
    "multi_stage_wake_up": "",
    "enable_sleep_mode": "",
    "standalone_gpu_memory_utilization": "",
    "sglang_engine_mode": "",
    "layer_name_map": "",
    "server": "",
}
"""Settings of engines that SGLang's server is not started with, and SGLang's own of `engine_kwargs.sglang`."""

_UNUSED_OF_ENGINES = ("do_sample", "n", "temperature", "top_k", "top_p", "layered_summon", "ignore_eos")


def _rows_of_engines() -> Iterator[RefusalRow]:
    why = "SGLang is not started with it"
    remedy = "set SGLang's own in engine_kwargs.sglang of that section"
    for name, own in _OTHER_ENGINES.items():
        yield from _rows(
            f"{_ROLLOUT}.{name}", why, f"set rollout.engine_kwargs.sglang.{own}" if own else "leave it out"
        )
    for section, is_there in _OTHER_SECTIONS.items():
        keys = [f"{section}.{name}" for name in _OTHER_ENGINES]
        yield from _rows(keys, why, remedy, when=is_there)
    for name in _OTHER_ENGINES:
        key = f"{_TEACHERS}.*.inference.{name}"
        yield RefusalRow(key, _changed_of_teachers(name), why, remedy, given="{found}", is_refusal=False)
    for section, is_there in _OTHER_SECTIONS.items():
        keys = [f"{section}.{name}" for name in _UNUSED_OF_ENGINES]
        why = "the requests to a reward model are your compute_score's, and say it themselves"
        yield from _rows(keys, why, "leave it out", when=is_there)


_COST = [
    *(
        RefusalRow(
            f"critic.{name}",
            when=_ignored_lengths(f"critic.{name}"),
            why="the V1 trainer takes critic.ppo_infer_max_token_len_per_gpu, which verl's YAML does not have",
            remedy="set that one, with a + before it",
            is_refusal=False,
        )
        for name in _CLIP_LENGTHS
    ),
    RefusalRow(
        (f"{_ROLLOUT}.val_kwargs.do_sample", f"{_ROLLOUT}.val_kwargs.temperature"),
        when=lambda run: run.rollout.val_kwargs.do_sample != ((run.rollout.val_kwargs.temperature or 0) > 0),
        why="nothing reads the first, and validation samples where the temperature is above 0",
        remedy="let the two agree",
        is_refusal=False,
    ),
    RefusalRow(
        f"{_ROLLOUT}.calculate_log_probs",
        when=lambda run: run.has_our_loop and not run.rollout.calculate_log_probs,
        why="our agent loop asks for log-probabilities all the same, and verl only leaves out its comparison of them",
        remedy="leave it out",
        is_refusal=False,
    ),
    *_rows_of_engines(),
    *_rows(
        ["critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"],
        _UNREAD,
        "set critic.ppo_micro_batch_size_per_gpu",
        when=_with_critic,
    ),
    *_rows(
        "critic.ulysses_sequence_parallel_size",
        "verl checks it alone",
        "set critic.fsdp.ulysses_sequence_parallel_size",
        when=_with_critic,
    ),
    *_rows(f"{_ACTOR}.checkpoint.strict", "only Megatron reads it", "leave it out", when=_without_megatron),
    *_rows(
        [f"critic.checkpoint.{name}" for name in ("async_save", "strict")],
        "only Megatron reads it",
        "leave it out",
        when=lambda run: run.has_critic and not run.is_megatron,
    ),
    *_rows_of_strategy("fsdp", ["offload_policy"], "only fsdp2 reads it"),
    *_rows_of_strategy("fsdp2", ["use_orig_params", "wrap_policy.min_num_params"], "only fsdp reads it"),
    *_rows(
        "data.trust_remote_code",
        "the V1 trainer takes the model's setting of that name",
        "set model.trust_remote_code, too",
        when=lambda run: not run.value(f"{_MODEL}.trust_remote_code"),
    ),
]


def _rows_of_table(weight: str) -> Iterator[RefusalRow]:
    """Yield a row for each setting to which `verl_keys.tsv` gives a reason of that weight, whatever else a run has."""
    for entry in verl_keys.entries():
        if entry.weight == weight:
            yield from _rows(entry.settings(), entry.reason, entry.remedy, refused=weight == REFUSE)


SILENT: list[Check] = [*_LEARNING, *_rows_of_table(REFUSE), *_COST, *_rows_of_table(TELL), *PARTS_OFF]


def applies(run: RunView) -> bool:
    """Return whether the rows apply to a run: verl's V1 trainer, SGLang, and conversations or servers of ours."""
    return run.is_v1 and run.is_sglang and (run.runs_our_server or run.has_our_loop)


def tell_all(run: RunView, rows: Sequence[Check]) -> None:
    """Report all silent settings of a run in one message.

    Args:
        run: A view of the configuration.
        rows: The rows of the settings.

    Raises:
        ConfigError: A setting would change the training, and `silent_settings` is `refuse`.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for row in rows:
        assert isinstance(row, RefusalRow), row  # a function would be left out in silence
        if (message := row.message(run)) is not None:
            found[row.is_refusal].append(f"\n  - {message}")
    refused, told = map("".join, (found[True], found[False]))
    begin = "settings of verl that do nothing here, or not what they say"
    if refused and run.settings.silent_settings == "refuse":
        others = f"\nand, less important:{told}" if told else ""
        raise ConfigError(f"{begin}:{refused}{others}\n(to go on all the same: ++{_SWITCH}=warn)")
    if refused or told:
        run.tell(f"{begin}:{refused}{told}")
