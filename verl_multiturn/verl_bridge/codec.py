"""The chat codec of a model: verl's builder for its family, and what we add around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from verl.utils.tokenizer.chat_template import initialize_turn_separator
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.rendering import Difference, RenderingCheck
from verl_multiturn.chat.template import Rule, Template, examine_template
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.registry import schema_of
from verl_multiturn.verl_bridge.parsers import make_parser
from verl_multiturn.verl_bridge.rows import make_request


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
    ignored: Collection[Difference] = (),
) -> ModelChat:
    """The codec for a tokenizer and the `model_type` of its model's config.json.

    Args:
        template_kwargs: `data.apply_chat_template_kwargs`.
        end_ids: by default those of the tokenizer and of the model's generation_config.json.
        ignored: differences that `check` does not tell.
    """
    kwargs = dict(template_kwargs or {})
    ends = model_end_ids(tokenizer) if end_ids is None else end_ids
    builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, chat_template_kwargs=kwargs)
    # verl's builders for a known family restore the separator after a turn; its default one loses it.
    loses_separator = type(builder) is ContinuousTokenBuilder
    separator = initialize_turn_separator(tokenizer, **kwargs) if loses_separator else []
    codec = ChatCodec(builder, ends, separator, Firewall(tokenizer), tokenizer)
    asked = "q7z"  # found again in no template
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.decode(codec.initial(messages, []), skip_special_tokens=False)
    without = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False, **kwargs)
    generation_prompt = prompt[len(without) :] if prompt.startswith(without) else prompt.rpartition(asked)[2]
    check = RenderingCheck(tokenizer, kwargs, generation_prompt, ends, ignored)
    return ModelChat(codec, type(builder).__name__, ends, generation_prompt, check)


def load_chat(model: str, template_kwargs: Mapping[str, Any] | None = None, **settings: Any) -> tuple[Any, ModelChat]:
    """Tokenizer and codec of a model that lies on this machine, or in Hugging Face's cache of it.

    Args:
        settings: `custom_chat_template`, `trust_remote_code`, as in `actor_rollout_ref.model` and `data`.

    Raises:
        ConfigError: it does not lie here.
    """
    path = str(Path(model).expanduser())
    trust = bool(settings.get("trust_remote_code"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        model_type = AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True).model_type
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer and config.json of {model!r} on this machine: {error}"[:500]) from None
    if settings.get("custom_chat_template"):
        tokenizer.chat_template = settings["custom_chat_template"]
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {model!r} has no chat template; set model.custom_chat_template")
    try:
        return tokenizer, make_chat(tokenizer, model_type, template_kwargs)
    except ValueError as error:
        raise ConfigError(f"{model!r} (model_type {model_type!r}): {error}") from None


def examine_model(
    model: str, tool_format: str, tools: bool = True, template_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> list[Rule]:
    """The rules that a model's template keeps, as `chat.template.examine_template` finds them.

    Raises:
        ConfigError: the model does not lie on this machine, or there is no such format.
    """
    tokenizer, chat = load_chat(model, template_kwargs, **settings)
    parser = make_parser(tool_format, tokenizer, chat.end_ids)
    return asyncio.run(
        examine_template(
            Template(tokenizer, chat.codec, chat.check, parser, chat.end_ids, chat.generation_prompt), tools
        )
    )


def prompt_measure(model: str, tools: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], int]:
    """Counts the tokens of a data row's prompt, the schemas of its tools included.

    Raises:
        ConfigError: the model does not lie on this machine; from the counter: the row cannot be rendered.
    """
    _, chat = load_chat(model)

    def measure(row: Mapping[str, Any]) -> int:
        request = make_request({**row, "raw_prompt": row["prompt"]}, tools, {}, "row")
        schemas = [schema_of(tool).as_dict() for tool in request.tools.values()]
        return len(chat.codec.initial(chat.codec.trusted(request.messages), schemas))

    return measure


def model_end_ids(tokenizer: Any) -> list[int]:
    """Every id that SGLang ends a turn with: the tokenizer's, and the model's own list (Llama 3 and Qwen have two)."""
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    try:
        listed = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except (OSError, ValueError):
        listed = None  # a model without generation_config.json
    found |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(found - {None})
