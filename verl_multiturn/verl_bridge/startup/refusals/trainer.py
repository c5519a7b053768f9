"""Refusals about the trainer, and about sizes that verl 0.9.1's V1 trainer cannot divide, or only after minutes.

Where micro-batches count rows, verl's `validate_config` raises for a `train_batch_size` below the mini-batch, and for
one whose conversations are no multiple of the devices. The trainer pads each other batch to whole mini-batches
(`_get_required_batch_multiple`), so a `train_batch_size` that is no multiple of the mini-batch is accepted. A
mini-batch itself is divided among the data-parallel ranks and then into micro-batches (`engine_workers.py`,
`train_mini_batch`), and there verl asserts that nothing remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl_multiturn.config import PATH
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.verl_names import has_other_plugins
from verl_multiturn.verl_bridge.startup.view import TRAINERS, RunView

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ADAPTER = (*ADAPTER_RANKS, "actor_rollout_ref.model.lora_adapter_path")
_BATCH, _PADDING = "data.train_batch_size", "actor_rollout_ref.model.use_remove_padding"
_APART = "trainer.v1.separate_async.parameter_sync_step"
_MINI = f"{_ACTOR}.ppo_mini_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_trainer_name(run: RunView) -> None:
    """Refuse a misspelt name of a trainer, which verl would find only after Ray has started.

    A name that is like none of verl's may be that of a trainer which only the trainer's own process registers.
    """
    name = str(run.trainer_mode)
    if not run.is_v1 or run.our_trainer is not None or not (hint := did_you_mean(name, TRAINERS)):
        return
    if has_other_plugins():
        run.require_stack()
    if not run.is_early:
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

        if name in TRAINER_REGISTRY:
            return
    raise ConfigError(f"trainer.v1.trainer_mode={name!r}: no trainer has this name; {hint}")


TRAINER: list[Check] = [check_trainer_name]


def _row_of_steps(mode: str) -> RefusalRow:
    key = f"trainer.v1.{mode}.parameter_sync_step"
    return RefusalRow(
        key,
        when=lambda run: run.our_trainer == mode and run.value(key) not in (None, 1),
        why="only the trainer separate_async makes several updates in a step. After the first one, the engines of "
        f"'{mode}' stand still, and the second may never end",
        remedy="leave it out",
    )


def _steps_apart(run: RunView) -> dict[str, int] | None:
    """Return the rows of a step of `separate_async` where `train_batch_size` is another number."""
    steps, mini, batch = (run.value(key) for key in (_APART, _MINI, _BATCH))
    if run.our_trainer != "separate_async" or steps is None or batch == steps * mini:
        return None
    return {"product": steps * mini}


_ENGINE_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def _engine_misfit(run: RunView) -> dict[str, Any] | None:
    """Return the numbers of GPUs that whole engines do not fill; verl notices when the models are loaded, or waits."""
    apart = run.our_trainer == "separate_async"
    pools = [_ROLLOUT] if apart else []
    # In separate_async, too, the trainer's GPUs have engines, which validate and help out.
    pools += ["trainer"] if not apart or run.config.actor_rollout_ref.get("hybrid_engine", True) else []
    sizes = {f"{_ROLLOUT}.{name}": run.rollout[name] for name in _ENGINE_SIZES}
    each = math.prod(sizes.values())
    for pool in pools:
        nodes, gpus = (run.value(f"{pool}.{name}") for name in ("nnodes", "n_gpus_per_node"))
        if nodes * gpus % each:
            shown = " × ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
            return {"shown": shown, "each": each, "pool": pool, "nodes": nodes, "gpus": gpus, "devices": nodes * gpus}
    return None


def _rows_of_mini_batch(section: str) -> list[RefusalRow]:
    """Return the rows of an actor's or a critic's mini-batch."""
    keys = (f"{section}.ppo_mini_batch_size", f"{_ROLLOUT}.n")

    def divided(run: RunView) -> dict[str, int]:
        part = run.value(section)
        ranks = _data_parallel_ranks(run, part) if _is_trained(run, section) else 0
        if not ranks or not isinstance(part.ppo_mini_batch_size, int):
            return {}
        mini, micro = part.ppo_mini_batch_size, 0 if part.use_dynamic_bsz else part.ppo_micro_batch_size_per_gpu or 0
        rows = mini * run.rollout.n
        return {"mini": mini, "micro": micro, "rows": rows, "ranks": ranks, "each": rows // ranks}

    return [
        RefusalRow(
            keys,
            when=lambda run: (found := divided(run)) and found["rows"] % found["ranks"] and found,
            why="a mini-batch has {found[rows]} rows, which cannot be divided equally among {found[ranks]} "
            "data-parallel ranks",
            remedy="make {found[mini]} times {run.rollout.n} a multiple of {found[ranks]}",
        ),
        RefusalRow(
            keys,
            when=lambda run: (found := divided(run)) and found["micro"] and found["each"] % found["micro"] and found,
            why="each of {found[ranks]} data-parallel ranks gets {found[each]} rows of a mini-batch, and "
            f"{section}.ppo_micro_batch_size_per_gpu={{found[micro]}} does not divide them",
            remedy=f"choose a divisor of {{found[each]}}, or set {section}.use_dynamic_bsz=True",
        ),
    ]


def _is_trained(run: RunView, section: str) -> bool:
    return section == _ACTOR or run.has_critic


def _below_mini_batch(section: str) -> RefusalRow:
    """Return the row of a batch that is smaller than a mini-batch of an actor or a critic."""
    key = f"{section}.ppo_mini_batch_size"

    def below(run: RunView) -> dict[str, int] | None:
        if not _is_trained(run, section) or run.value(section).use_dynamic_bsz:
            return None
        batch, mini = run.value(_BATCH), run.value(key)
        return {"batch": batch, "mini": mini} if batch < mini else None

    return RefusalRow(
        (_BATCH, key),
        when=below,
        why="verl takes no batch below a mini-batch where micro-batches count rows",
        remedy="raise the first to {found[mini]}, lower the second to {found[batch]}, or set "
        f"{section}.use_dynamic_bsz=True",
    )


def _uneven_batch(run: RunView) -> dict[str, int] | None:
    """Return the conversations of a step that are no multiple of the devices; with Megatron verl counts otherwise."""
    if run.value(_ACTOR).use_dynamic_bsz or run.is_megatron:
        return None
    rows, devices = run.value(_BATCH) * run.rollout.n, _devices(run)
    return {"rows": rows, "devices": devices} if rows % devices else None


def _two_micro_batches(section: str, name: str, is_read: Callable[[RunView], Any]) -> RefusalRow:
    """Return the row of a micro-batch that is given for all GPUs, verl's older form, and for each.

    Args:
        section: Section of the model that computes the micro-batches.
        name: The older setting's name.
        is_read: Returns whether a run has these micro-batches.
    """
    keys = (f"{section}.{name}", f"{section}.{name}_per_gpu")
    return RefusalRow(
        keys,
        when=lambda run: is_read(run) and not run.value(_ACTOR).use_dynamic_bsz and None not in map(run.value, keys),
        why="verl takes one of the two",
        remedy="leave out the first",
    )


def _devices(run: RunView) -> int:
    return int(run.config.trainer.n_gpus_per_node * run.config.trainer.nnodes)


def _data_parallel_ranks(run: RunView, part: Any) -> int:
    """Return the number of data-parallel ranks of an actor or a critic; 0 where it is not known."""
    if _has_dynamic_parts(part):
        return 1
    split, devices = _gpus_of_a_model(part), _devices(run)
    return devices // split if split and devices % split == 0 else 0  # the rest is refused


def _gpus_of_a_model(part: Any) -> int:
    """Return how many GPUs hold one data-parallel rank of an actor or a critic; 0 where it is not known."""
    split = _ranks_of_a_row(part)
    if part.strategy == "megatron":
        engine = part.get("megatron") or {}
        split *= math.prod(engine.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    return split


def _has_dynamic_parts(part: Any) -> bool:
    """Return whether Megatron decides for each batch how many ranks hold a row; verl then divides by another limit."""
    return part.strategy == "megatron" and bool((part.get("megatron") or {}).get("dynamic_context_parallel"))


def _ranks_of_a_row(part: Any) -> int:
    """Return how many ranks of an actor or a critic hold the tokens of a row together; 0 where it is not known."""
    if _has_dynamic_parts(part):
        return 0
    if part.strategy in ("fsdp", "fsdp2"):
        # The actor's section is `fsdp_config`, and there verl's older key, beside the section, wins.
        older = part.get("ulysses_sequence_parallel_size") or 1 if "fsdp_config" in part else 1
        engine = part.get("fsdp_config") or part.get("fsdp") or {}
        return int(older if older > 1 else engine.get("ulysses_sequence_parallel_size") or 1)
    if part.strategy == "megatron":
        # The section is missing where the strategy alone was changed, which verl refuses.
        return int((part.get("megatron") or {}).get("context_parallel_size") or 1)
    return 0


def _parallel_misfit(section: str) -> RefusalRow:
    """Return the row of parallel sizes of an actor or a critic that do not divide the number of the trainer's GPUs."""

    def misfit(run: RunView) -> dict[str, int] | None:
        if not _is_trained(run, section):
            return None
        split, devices = _gpus_of_a_model(run.value(section)), _devices(run)
        return {"split": split, "devices": devices} if split and devices % split else None

    return RefusalRow(
        ("trainer.n_gpus_per_node", "trainer.nnodes"),
        when=misfit,
        why=f"the parallel sizes of {section} take {{found[split]}} GPUs, and {{found[devices]}} are no multiple of it",
        remedy="change the sizes, or the number of GPUs",
    )


def _row_of_micro_batches(
    key: str,
    part: str = _ACTOR,
    switch: str = "use_dynamic_bsz",
    is_read: Callable[[RunView], Any] = lambda run: True,
    default: int | None = None,
) -> RefusalRow:
    """Return the row of a micro-batch's tokens; verl asserts that each row of a batch fits into one.

    Args:
        key: The number of tokens.
        part: Section of the model that computes the micro-batches.
        switch: Setting of that section that makes them as long as the value of `key`.
        is_read: Returns whether a run has these micro-batches.
        default: The number where verl's YAML has none.
    """

    def too_few(run: RunView) -> dict[str, int] | None:
        if not (is_read(run) and run.value(f"{part}.{switch}")):
            return None
        if not isinstance(most := run.value(key) or default, int):
            return None
        found = {"given": most, "most": most * _ranks_of_a_row(run.value(part)), "longest": run.longest_row}
        return found if 0 < found["most"] < found["longest"] else None

    return RefusalRow(
        key,
        when=too_few,
        given=f"{key}={{found[given]}}",
        why="a row may have {found[longest]} tokens (data.max_prompt_length + data.max_response_length), and verl ends "
        "the run at the first one of more than {found[most]}",
        remedy="raise it, or lower one of these lengths",
        is_refusal=False,
    )


def _actor_is_reference(run: RunView) -> bool:
    """Return whether the actor without its adapter is the reference."""
    return run.has_reference and any(map(run.value, _ADAPTER))


BATCH_SIZES = [
    RefusalRow(
        (_BATCH, _APART, _MINI),
        when=_steps_apart,
        why="the trainer separate_async needs the product of the last two, {found[product]}, as train_batch_size",
        remedy="change one of the three",
    ),
    *(_row_of_steps(mode) for mode in TRAINERS if mode != "separate_async"),
    RefusalRow(
        tuple(f"{_ROLLOUT}.{name}" for name in _ENGINE_SIZES),
        when=_engine_misfit,
        given="{found[shown]}",
        why="an engine takes {found[each]} GPUs, and {found[pool]}.nnodes={found[nodes]} × "
        "{found[pool]}.n_gpus_per_node={found[gpus]} gives {found[devices]}, which is no multiple of it",
        remedy="engines of 1 GPU always fit",
    ),
    *map(_below_mini_batch, (_ACTOR, "critic")),
    RefusalRow(
        (_BATCH, f"{_ROLLOUT}.n"),
        when=_uneven_batch,
        why="verl takes no batch of {found[rows]} conversations, which is no multiple of the trainer's "
        "{found[devices]} devices, where micro-batches count rows",
        remedy=f"change one of the two, or set {_ACTOR}.use_dynamic_bsz=True",
    ),
    _two_micro_batches(_ACTOR, "ppo_micro_batch_size", lambda run: True),
    _two_micro_batches(_ROLLOUT, "log_prob_micro_batch_size", lambda run: True),
    _two_micro_batches(_REF, "log_prob_micro_batch_size", lambda run: run.has_reference),
    *(row for section in (_ACTOR, "critic") for row in _rows_of_mini_batch(section)),
    *map(_parallel_misfit, (_ACTOR, "critic")),
    RefusalRow(
        (f"{_ACTOR}.ulysses_sequence_parallel_size", _PADDING),
        when=lambda run: (
            run.is_fsdp and (run.value(f"{_ACTOR}.ulysses_sequence_parallel_size") or 1) > 1 and not run.value(_PADDING)
        ),
        why="ranks that hold a row together need rows without padding",
        remedy="set the second to True, or the first to 1",
    ),
    _row_of_micro_batches(f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    _row_of_micro_batches(
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
        is_read=lambda run: not run.value(_BYPASS) or _actor_is_reference(run),
    ),
    _row_of_micro_batches(
        f"{_REF}.log_prob_max_token_len_per_gpu",
        _REF,
        "log_prob_use_dynamic_bsz",
        lambda run: run.has_reference and not _actor_is_reference(run),
    ),
    _row_of_micro_batches(
        "critic.ppo_infer_max_token_len_per_gpu", "critic", is_read=lambda run: run.has_critic, default=32768
    ),
]


def _is_unverified(run: RunView) -> bool:
    return run.our_trainer is None and run.settings.certificate_share > 0


def _warning_of_unverified(key: str, is_v1: bool) -> RefusalRow:
    return RefusalRow(
        key,
        when=lambda run: _is_unverified(run) and bool(run.config.trainer.use_v1) is is_v1,
        why="training batches are not verified against what the engine returned, and there are no rollout/* metrics "
        "(only with verl's own V1 trainers)",
        remedy="{PATH}.certificate_share=0 silences this",
        is_refusal=False,
    )


OUTAGES = [
    RefusalRow(
        f"{PATH}.outage.mode",
        when=lambda run: run.our_trainer is None and run.settings.outage.mode != "off",
        why="conversations that meet an outage end or wait, but only verl's own V1 trainers leave out those that had "
        "ended before it was judged or that no reward could judge, and end the run after outage.stop_s",
        remedy="use one of them",
        is_refusal=False,
    ),
]

_BOUND = f"{PATH}.old_log_prob_bound"


def _takes_engines(run: RunView) -> bool:
    return run.settings.old_log_prob_bound is not None


OLD_LOG_PROBS = [
    needs_our_trainer(_BOUND, _takes_engines, "leave it out"),
    RefusalRow(
        (_BOUND, _BYPASS),
        when=lambda run: _takes_engines(run) and run.value(_BYPASS),
        why="verl then takes the engine's log-probs for all tokens, compared or not",
        remedy="leave out one of the two",
    ),
]

CERTIFICATE = [
    RefusalRow(
        "skip.rollout_tq.enable",
        when=lambda run: (
            run.our_trainer is not None and run.settings.certificate_share > 0 and run.value("skip.rollout_tq.enable")
        ),
        why="verl gives cached rollouts another name and other weight versions than those that they were sampled "
        "under, so that they cannot be verified",
        remedy="set {PATH}.certificate_share=0, or skip.rollout_tq.enable=False",
    ),
    _warning_of_unverified("trainer.v1.trainer_mode", True),
    _warning_of_unverified("trainer.use_v1", False),
]
