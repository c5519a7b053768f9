"""The cases that the prefix-tree engine cannot compute exactly: each reason in words, for a message.

A run's settings and the model's configuration are looked at here. A probe finds the other cases: `engine.py`
computes a few made rows both ways before the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from verl_multiturn.verl_bridge.settings import OF_ROWS


def unfit_engine(engine: Any, model: Any, device: str) -> str | None:
    """Return why an engine with these settings computes no forests; None: it can.

    Args:
        engine: verl's settings of the FSDP engine.
        model: verl's settings of the model.
        device: verl's name of the kind of device.
    """
    qat = getattr(engine, "qat", None)
    reasons = {
        "an NPU, on which they were never tried": device == "npu",
        f"ulysses_sequence_parallel_size={engine.ulysses_sequence_parallel_size}": (
            engine.ulysses_sequence_parallel_size > 1
        ),
        "use_fused_kernels=True": model.use_fused_kernels,
        "use_liger=True": model.use_liger,
        "pad_to_length=True": engine.pad_to_length,
        "quantization-aware training": qat is not None and getattr(qat, "enable", False),
        "mtp": getattr(getattr(model, "mtp", None), "enable", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def unfit_model(module: nn.Module, config: Any) -> str | None:
    """Return why a model's rows cannot be a forest; None: nothing speaks against it.

    Args:
        module: The model.
        config: Its configuration in transformers.
    """
    return next(_reasons(module, config), None)


def _reasons(module: nn.Module, config: Any) -> Iterator[str]:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        yield f"layers of {', '.join(sorted(kinds))}"
    # A configuration's `layer_types` names the layers with the window.
    elsewhere = getattr(config, "layer_types", None) or not getattr(config, "use_sliding_window", True)
    if not elsewhere and getattr(config, "sliding_window", None):
        yield f"a sliding window of {config.sliding_window} tokens"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        yield f"positions of the kind {rope['rope_type']}, which depend on the longest row of a micro-batch"
    for name in ("vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            yield f"a model with a {name}"
    if getattr(config, "output_router_logits", False):
        yield "experts with an auxiliary loss (output_router_logits)"
    rates = [each.p for each in module.modules() if isinstance(each, nn.Dropout)]
    if (rate := max([getattr(config, "attention_dropout", None) or 0.0, *rates])) > 0:
        yield f"a dropout of {rate}"
    if not any(getattr(each, "_supports_attention_backend", False) for each in module.modules()):
        yield f"{type(module).__name__}, which takes no attention function of transformers' registry"


def unfit_batch(flags: Mapping[str, Any]) -> str | None:
    """Return why a batch is computed row by row; None: its rows may be a forest.

    Args:
        flags: The batch's flags, by name; a missing flag is off.
    """
    if flags.get("distillation_use_topk") or flags.get("distillation_only"):
        return "top-k distillation"
    if flags.get("enable_routing_replay"):
        return "routing replay"
    if flags.get("use_fused_kernels"):
        return "use_fused_kernels=True"
    if flags.get("rope_dimensions", 1) > 1:
        return "positions of several dimensions"
    return None


def unfit_loss(settings: Any) -> str | None:
    """Return why a loss may be another one in micro-batches of other rows; None: it is the same.

    Args:
        settings: verl's settings of the actor, by which it computes the loss; None: there is no such loss.
    """
    if (policy := getattr(settings, "policy_loss", None)) is None:
        return None
    if (mode := policy.get("loss_mode", "vanilla")) not in OF_ROWS:
        return f"loss_mode={mode}, which may depend on the micro-batches"
    correction = policy.get("rollout_correction") or {}
    if mode == "bypass_mode" and correction.get("rollout_is_batch_normalize"):
        return "loss_mode=bypass_mode with rollout_is_batch_normalize=True, which depends on the micro-batches"
    if settings.loss_agg_mode == "seq-mean-token-sum-norm" and settings.loss_scale_factor is None:
        return "loss_agg_mode=seq-mean-token-sum-norm without loss_scale_factor, which depends on the micro-batches"
    return None
