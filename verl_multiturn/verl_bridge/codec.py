"""The chat codec of a model: verl's builder for its family, and what we add around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from verl.utils.tokenizer.chat_template import initialize_turn_separator
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.rendering import RenderingCheck


@dataclass(frozen=True)
class ModelChat:
    """How one model's conversations are written and read."""

    codec: ChatCodec
    family: str
    """The class of verl's builder."""
    end_ids: list[int]
    """Every id that ends a turn."""
    generation_prompt: str
    """What a prompt ends with, up to where the model begins."""
    check: RenderingCheck


def make_chat(
    tokenizer: Any,
    model_type: str | None,
    template_kwargs: Mapping[str, Any] | None = None,
    end_ids: list[int] | None = None,
) -> ModelChat:
    """The codec for a tokenizer and the `model_type` of its model's config.json.

    Args:
        template_kwargs: `data.apply_chat_template_kwargs`.
        end_ids: by default those of the tokenizer and of the model's generation_config.json.
    """
    kwargs = dict(template_kwargs or {})
    ends = model_end_ids(tokenizer) if end_ids is None else end_ids
    builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, chat_template_kwargs=kwargs)
    # verl's builders for a known family restore the separator after a turn; its default one loses it.
    loses_separator = type(builder) is ContinuousTokenBuilder
    separator = initialize_turn_separator(tokenizer, **kwargs) if loses_separator else []
    codec = ChatCodec(builder, ends, separator, Firewall(tokenizer), tokenizer)
    asked = "q7z"  # found again in no template
    prompt = tokenizer.decode(codec.initial([{"role": "user", "content": asked}], []), skip_special_tokens=False)
    generation_prompt = prompt.rpartition(asked)[2]
    check = RenderingCheck(tokenizer, kwargs, generation_prompt, ends)
    return ModelChat(codec, type(builder).__name__, ends, generation_prompt, check)


def model_end_ids(tokenizer: Any) -> list[int]:
    """Every id that SGLang ends a turn with: the tokenizer's, and the model's own list (Llama 3 and Qwen have two)."""
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    try:
        listed = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except (OSError, ValueError):
        listed = None  # a model without generation_config.json
    found |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(found - {None})
