"""Refusals about the generation servers: whose they are, and features of ours alone, or of verl's alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.names import ROLLOUT, SGLANG
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS, OWN_SERVER, adapter_rank, is_disaggregated, own_server
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_ROLLOUT = "actor_rollout_ref.rollout"
_NAME = f"{_ROLLOUT}.name"
_STAGES = f"{_ROLLOUT}.pipeline_model_parallel_size"
_DISAGGREGATED = f"{_ROLLOUT}.disaggregation.enabled"
_MODEL_LEN = f"{_ROLLOUT}.max_model_len"
_STALENESS, _RATE = f"{PATH}.max_staleness", f"{_ROLLOUT}.over_sample_rate"


def _row_of_adapters(key: str) -> RefusalRow:
    # verl sends the result of `get_per_tensor_param()`, which for an adapter is the frozen base (verl issue 7495).
    return RefusalRow(
        (key, "trainer.v1.trainer_mode"),
        when=lambda run: (
            run.our_trainer == "separate_async"
            and (run.runs_our_server or run.has_our_loop)
            and adapter_rank(run.config)[0] == key
        ),
        why="verl 0.9.1 sends the base model without the adapter to engines that are apart from the trainer, so that "
        "they would sample the untrained model for ever",
        remedy="set actor_rollout_ref.model.lora.merge=True, or trainer.v1.trainer_mode=colocate_async",
    )


def _row_of_disaggregation(key: str, is_asked_for: Callable[[RunView], Any]) -> RefusalRow:
    return RefusalRow(
        (key, _DISAGGREGATED),
        when=lambda run: is_disaggregated(run.rollout) and is_asked_for(run),
        why="servers that only read prompts, or only sample, are verl's own, and only ours take the first",
        remedy="leave out one of the two",
    )


def _another_class(run: RunView) -> Any:
    if not run.runs_our_server:
        return None
    run.require_stack()
    from verl_multiturn.verl_bridge.servers.registrations import another_class

    return another_class()


SERVERS: list[Check] = [
    RefusalRow(
        (OWN_SERVER, _NAME),
        when=lambda run: own_server(run.rollout) and run.rollout.name not in (SGLANG, ROLLOUT),
        why=f"our server is one of SGLang's. The start-up check sets {OWN_SERVER} where {_NAME}={ROLLOUT}",
        remedy=f"set {_NAME}={ROLLOUT}, or leave own_server out",
    ),
    RefusalRow(
        (OWN_SERVER, _NAME),
        when=lambda run: own_server(run.rollout) is False and run.rollout.name == ROLLOUT,
        why=f"the name {ROLLOUT} asks for our server, and own_server for verl's",
        remedy=f"leave own_server out, or set {_NAME}={SGLANG}",
    ),
    _row_of_disaggregation(OWN_SERVER, lambda run: run.is_set(OWN_SERVER)),
    _row_of_disaggregation(_STALENESS, lambda run: run.is_set(_STALENESS)),
    _row_of_disaggregation(_RATE, lambda run: run.value(_RATE)),
    RefusalRow(
        _DISAGGREGATED,
        when=lambda run: is_disaggregated(run.rollout) and run.rollout.name == ROLLOUT,
        given=f"{_NAME}={ROLLOUT!r} with {_DISAGGREGATED}=True",
        why="the servers are verl's own. They cannot stop a single generation, and one that dies ends the run",
        remedy=f"{_NAME}={SGLANG} says the same",
        is_refusal=False,
    ),
    RefusalRow(
        _STAGES,
        when=lambda run: run.runs_our_server and (run.value(_STAGES) or 1) > 1,
        why="verl 0.9.1 does not place SGLang's pipeline stages on its GPUs",
        remedy=f"leave it out, and set {_ROLLOUT}.tensor_model_parallel_size",
    ),
    *map(_row_of_adapters, ADAPTER_RANKS),
    RefusalRow(
        _NAME,
        when=_another_class,
        given=f"{_NAME}={ROLLOUT!r}",
        why="our classes must stand under verl's name 'sglang', where {found.place} has {found.name}",
        remedy=f"derive yours from {{found.ours}}, or set {_NAME}={SGLANG} for verl's servers",
    ),
    RefusalRow(
        _MODEL_LEN,
        when=lambda run: run.is_sglang and (run.rollout.max_model_len or 0) > (run.model_tokens or math.inf),
        why="verl's SGLang servers refuse more than the {run.model_tokens} tokens of the model's "
        "max_position_embeddings",
        remedy="lower it, or leave it out",
    ),
    RefusalRow(
        _MODEL_LEN,
        when=lambda run: (
            run.has_our_loop
            and run.is_sglang
            and run.rollout.max_model_len is None
            and 0 < (run.model_tokens or 0) <= run.longest_row
        ),
        why="verl's SGLang servers take one token less than the {run.model_tokens} of the model's "
        "max_position_embeddings, and a conversation may have {run.longest_row} (data.max_prompt_length + "
        "data.max_response_length)",
        remedy="lower one of these lengths, or take a model for longer texts",
        is_refusal=False,
    ),
    RefusalRow(
        _MODEL_LEN,
        when=lambda run: run.has_our_loop and run.is_sglang and 0 < (run.rollout.max_model_len or 0) <= run.longest_row,
        why="a conversation may have {run.longest_row} tokens (data.max_prompt_length + data.max_response_length), and "
        "verl's SGLang servers take one less than this",
        remedy="raise it, or lower one of these lengths",
        is_refusal=False,
    ),
]
