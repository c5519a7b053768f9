"""The chat codec of a model: verl's builder for its family, and what we add around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from verl.utils.tokenizer.chat_template import initialize_turn_separator
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, VLContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_multiturn.chat.answer_tags import answer_tags
from verl_multiturn.chat.call_formats import PYTHON_FORMATS
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.images import load_images
from verl_multiturn.chat.rendering import Difference, RenderingCheck
from verl_multiturn.chat.shown_schemas import must_stay
from verl_multiturn.chat.template import SCHEMA, Rule, Template, examine_template
from verl_multiturn.chat.tir import TIR, TirCodec
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.registry import schema_of
from verl_multiturn.verl_bridge.images import image_reader, load_processor, own_processor, row_messages, vision_of
from verl_multiturn.verl_bridge.parsers import check_format, make_parser
from verl_multiturn.verl_bridge.rows import make_request


@dataclass(frozen=True)
class ModelChat:
    """How one model's conversations are written and read."""

    codec: ChatCodec
    end_ids: list[int]
    """Every id that ends a turn."""
    generation_prompt: str
    """What a prompt ends with, up to where the model begins."""
    check: RenderingCheck
    processor: Any = None
    """Of a model that takes images, for the codec alone."""


def make_chat(
    tokenizer: Any,
    model_type: str | None,
    template_kwargs: Mapping[str, Any] | None = None,
    end_ids: list[int] | None = None,
    ignored: Collection[Difference] = (),
    processor: Any = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    text_mode: bool = False,
) -> ModelChat:
    """The codec for a tokenizer and the `model_type` of its model's config.json.

    Args:
        template_kwargs: `data.apply_chat_template_kwargs`.
        end_ids: by default those of the tokenizer and of the model's generation_config.json.
        ignored: differences that `check` does not tell.
        processor: of a model that takes images, as verl loads it.
        mm_processor_kwargs: `data.mm_processor_kwargs`.
        text_mode: whether the template writes the prompt alone, as with `multi_turn.format=tir`.

    Raises:
        ConfigError: text mode, and the model takes images.
        ValueError: verl has no builder for the model, or one for images and there is no processor.
    """
    kwargs = dict(template_kwargs or {})
    ends = model_end_ids(tokenizer) if end_ids is None else end_ids
    vision = None
    if processor is not None:
        if text_mode:
            raise ConfigError(f"rollout.multi_turn.format={TIR} is text alone; use a model that takes no images")
        processor = own_processor(processor)
        vision = vision_of(processor)
    builder = create_continuous_token_builder(
        tokenizer,
        hf_model_type=model_type,
        chat_template_kwargs=kwargs,
        processor=processor,
        mm_processor_kwargs=dict(mm_processor_kwargs or {}),
    )
    template = processor or tokenizer
    # verl's builders for a known family restore the separator after a turn; its default ones lose it.
    loses_separator = type(builder) in (ContinuousTokenBuilder, VLContinuousTokenBuilder)
    separator = initialize_turn_separator(template, **kwargs) if loses_separator else []
    unguarded = ChatCodec(builder, ends, separator, vision=vision)
    tags = [] if text_mode else answer_tags(unguarded, tokenizer.decode, ends)
    firewall = Firewall(tokenizer, vision.texts if vision is not None else (), tags)
    codec = ChatCodec(builder, ends, separator, firewall, tokenizer, vision)
    codec.forget_schemas(SCHEMA, ends)
    asked = "q7z"  # found again in no template
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.decode(codec.initial(messages, []), skip_special_tokens=False)
    without = template.apply_chat_template(messages, add_generation_prompt=False, tokenize=False, **kwargs)
    generation_prompt = prompt[len(without) :] if prompt.startswith(without) else prompt.rpartition(asked)[2]
    check = RenderingCheck(tokenizer, kwargs, generation_prompt, ends, ignored, processor, vision)
    if text_mode:
        codec = TirCodec(builder, firewall, tokenizer)
    return ModelChat(codec, ends, generation_prompt, check, processor)


def load_chat(model: str, template_kwargs: Mapping[str, Any] | None = None, **settings: Any) -> tuple[Any, ModelChat]:
    """Tokenizer and codec of a model that lies on this machine, or in Hugging Face's cache of it.

    Args:
        settings: `custom_chat_template`, `trust_remote_code`, `mm_processor_kwargs`, as in `actor_rollout_ref.model`
            and `data`; `text_mode` as of `make_chat`.

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
    processor = load_processor(path, model_type, trust)
    kind, template = ("tokenizer", tokenizer) if processor is None else ("processor", processor)
    if settings.get("custom_chat_template"):
        template.chat_template = settings["custom_chat_template"]
    if not template.chat_template:
        raise ConfigError(f"the {kind} of {model!r} has no chat template; set model.custom_chat_template")
    given = {key: settings[key] for key in ("mm_processor_kwargs", "text_mode") if key in settings}
    try:
        return tokenizer, make_chat(tokenizer, model_type, template_kwargs, processor=processor, **given)
    except ValueError as error:
        raise ConfigError(f"{model!r} (model_type {model_type!r}): {error}") from None


def examine_model(
    model: str, tool_format: str, tools: bool = True, template_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> list[Rule]:
    """The rules that a model's template keeps, as `chat.template.examine_template` finds them; in text mode those that
    matter to it.

    Raises:
        ConfigError: the model does not lie on this machine, or there is no such format.
    """
    text_mode = tool_format == TIR
    tokenizer, chat = load_chat(model, template_kwargs, text_mode=text_mode, **settings)
    parser = make_parser(tool_format, tokenizer, chat.end_ids)
    template = Template(tokenizer, chat.codec, chat.check, parser, chat.end_ids, chat.generation_prompt)
    return asyncio.run(examine_template(template, tools and not text_mode, prompt_only=text_mode))


def prompt_measure(
    model: str, tools: Mapping[str, Any], tool_format: str = "hermes"
) -> Callable[[Mapping[str, Any]], int]:
    """Counts the tokens of a data row's prompt, with the schemas of its tools where the format shows them.

    Args:
        tool_format: `multi_turn.format`.

    Raises:
        ConfigError: the model does not lie on this machine, or no such format; from the counter: the row cannot be
            rendered.
    """
    check_format(tool_format)
    _, chat = load_chat(model, text_mode=tool_format == TIR)
    takes_images = chat.codec.vision is not None
    read = image_reader(chat.processor, {})

    def measure(row: Mapping[str, Any]) -> int:
        raw_prompt = row_messages(row, chat.processor) if takes_images else row["prompt"]
        request = make_request({**row, "raw_prompt": raw_prompt}, tools, {}, "row", takes_images)
        messages = request.messages
        if takes_images:
            messages = asyncio.run(load_images(messages, read, "its prompt"))
        schemas = [schema_of(tool).as_dict() for tool in request.tools.values()]
        return len(chat.codec.initial(chat.codec.trusted(messages), chat.codec.trusted_schemas(schemas)))

    return measure


def check_names(codec: ChatCodec, tools: Iterable[Any]) -> None:
    """Refuse tools with names, of their own, of arguments or of listed values, that no model could write: the template
    would show them with their control tokens broken.

    An MCP server's are not the author's: a model that calls by such a name is told that there is none.

    Raises:
        ConfigError: a tool has such a name.
    """
    for tool in tools:
        schemas = [schema_of(tool).as_dict()]
        names = zip(must_stay(schemas), must_stay(codec.trusted_schemas(schemas)), strict=True)
        changed = next((name for name, shown in names if name != shown), None)
        if changed is not None and not getattr(tool, "schema_of_others", False):
            raise ConfigError(
                f"tool {tool.name!r}: {changed!r} in its schema is a control token of the model's, or becomes one in "
                "the chat template, and no model could write it in a call; give it another name"
            )


def check_python_names(tool_format: str, tools: Iterable[Any]) -> None:
    """Refuse tools that cannot be called in a format whose calls are Python: their name, or that of an argument, is no
    name in Python. An MCP server's are not the author's, as in `check_names`.

    Raises:
        ConfigError: a tool has such a name.
    """
    if tool_format not in PYTHON_FORMATS:
        return
    for tool in tools:
        function = schema_of(tool).as_dict()["function"]
        names = [*function["name"].split("."), *(function.get("parameters") or {}).get("properties", {})]
        wrong = next((name for name in names if not name.isidentifier() or iskeyword(name)), None)
        if wrong is not None and not getattr(tool, "schema_of_others", False):
            raise ConfigError(
                f"tool {tool.name!r}: {wrong!r} is no name in Python, and calls in rollout.multi_turn.format="
                f"{tool_format} are Python; give the tool or its argument a name of letters, digits and underscores "
                "that is no keyword"
            )


def model_end_ids(tokenizer: Any) -> list[int]:
    """Every id that ends a turn: the tokenizer's, and those that the model lists (Llama 3 and Qwen have two).

    SGLang knows the model's alone, since verl starts it without a tokenizer: `Runner.sampling` names them all.
    """
    found = {tokenizer.eos_token_id}
    for source in (AutoConfig, GenerationConfig):
        try:
            listed = getattr(source.from_pretrained(tokenizer.name_or_path), "eos_token_id", None)
        except (OSError, ValueError):
            continue  # a model without that file
        found |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(found - {None})
