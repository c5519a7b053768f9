"""The chat codec of a model: verl's token builder for its family, with our checks and firewall around it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from verl.utils.tokenizer.chat_template import initialize_turn_separator
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, VLContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_multiturn.chat.answer_tags import answer_tags
from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.content_check import reasoning_left_out
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.encoding import SeamEncoder
from verl_multiturn.chat.images import load_images
from verl_multiturn.chat.rendering_check import RenderingCheck, RenderingDifference
from verl_multiturn.chat.template import SCHEMA, Template, examine_template
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.chat.template_rules import Rule
from verl_multiturn.chat.tir import TIR, TirCodec
from verl_multiturn.chat.tool_schemas import must_stay
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.tools.loading.kwargs import hidden_tools
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.verl_bridge.model.call_formats import check_format, make_parser
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import own_processor, row_messages, vision_of
from verl_multiturn.verl_bridge.model.suffix_builder import suffix_builder
from verl_multiturn.verl_bridge.rows import make_request


@dataclass(frozen=True)
class ModelChat:
    """Everything that writes and reads the conversations of one model."""

    codec: ChatCodec
    end_ids: list[int]
    """Every token id that ends a turn."""
    generation_prompt: str
    """Text at the end of a prompt that opens the assistant's turn."""
    check: RenderingCheck
    processor: Any = None
    """Processor of a model that takes images, a copy that only the codec uses; None for a text model."""


def make_chat(
    tokenizer: Any,
    model_type: str | None,
    template_kwargs: Mapping[str, Any] | None = None,
    end_ids: list[int] | None = None,
    ignored: Collection[RenderingDifference] = (),
    processor: Any = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    text_mode: bool = False,
) -> ModelChat:
    """Build the codec of a model, and its companions.

    Args:
        tokenizer: The model's tokenizer.
        model_type: `model_type` in the model's config.json.
        template_kwargs: `data.apply_chat_template_kwargs`.
        end_ids: Token ids that end a turn; None: those that `model_end_ids` finds.
        ignored: Kinds of differences that `check` does not report.
        processor: The processor of a model that takes images, as verl loads it; None for a text model.
        mm_processor_kwargs: `data.mm_processor_kwargs`.
        text_mode: Whether the template writes only the prompt, as with `multi_turn.format=tir`.

    Raises:
        ConfigError: In text mode the model takes images, or the processor names no image token.
        ValueError: verl has no builder for the model, or its builder needs a processor and there is none.
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
    # verl's builders for a known family restore the separator after a turn; its two default builders lose it.
    loses_separator = type(builder) in (ContinuousTokenBuilder, VLContinuousTokenBuilder)
    separator = initialize_turn_separator(template, **kwargs) if loses_separator else []

    def write(messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        text: str = template.apply_chat_template(
            list(messages), tools=list(schemas) or None, add_generation_prompt=True, tokenize=False, **kwargs
        )
        return text

    seams = SeamEncoder(tokenizer)
    builder = suffix_builder(builder, seams)
    unguarded = ChatCodec(builder, ends, separator, vision=vision, write=write)
    tags = [] if text_mode else answer_tags(unguarded, tokenizer.decode, ends)
    firewall = Firewall(tokenizer, vision.texts if vision is not None else (), tags)
    codec = ChatCodec(builder, ends, separator, firewall, tokenizer, vision, write)
    codec.forget_schemas(SCHEMA, ends)
    asked = "q7z"  # occurs in no template
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.decode(codec.rendered(messages, []), skip_special_tokens=False)
    without = template.apply_chat_template(messages, add_generation_prompt=False, tokenize=False, **kwargs)
    generation_prompt = prompt[len(without) :] if prompt.startswith(without) else prompt.rpartition(asked)[2]
    check = RenderingCheck(tokenizer, kwargs, generation_prompt, ends, ignored, processor, vision, seams)
    if text_mode:
        codec = TirCodec(builder, firewall, tokenizer, write)
    return ModelChat(codec, ends, generation_prompt, check, processor)


def chat_of(model: LoadedModel, template_kwargs: Mapping[str, Any] | None = None, **settings: Any) -> ModelChat:
    """Build the codec of a model that was loaded, and its companions.

    Args:
        model: The model.
        template_kwargs: `data.apply_chat_template_kwargs`.
        settings: `mm_processor_kwargs` and `text_mode`, as for `make_chat`.

    Raises:
        ConfigError: The model has no chat template, or verl has no builder for it.
    """
    path, processor = model.tokenizer.name_or_path, model.processor
    kind, template = ("tokenizer", model.tokenizer) if processor is None else ("processor", processor)
    if not template.chat_template:
        raise ConfigError(f"the {kind} of {path!r} has no chat template; set model.custom_chat_template")
    try:
        return make_chat(model.tokenizer, model.model_type, template_kwargs, processor=processor, **settings)
    except ValueError as error:
        raise ConfigError(f"{path!r} (model_type {model.model_type!r}): {error}") from None


def examine_model(
    model: LoadedModel,
    tool_format: str,
    tools: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Rule]:
    """Examine which rules of multi-turn training a model's template keeps, with `chat.template.examine_template`.

    Args:
        model: The model.
        tool_format: `multi_turn.format`; in text mode only the rules about prompts are examined.
        tools: Whether the run has tools.
        template_kwargs: `data.apply_chat_template_kwargs`.
        settings: `mm_processor_kwargs`, as for `make_chat`.

    Raises:
        ConfigError: The model has no chat template, verl has no builder for it, or there is no such format.
    """
    text_mode = tool_format == TIR
    tokenizer, chat = model.tokenizer, chat_of(model, template_kwargs, text_mode=text_mode, **settings)
    parser = make_parser(tool_format, tokenizer, chat.end_ids)
    template = Template(tokenizer, chat.codec, chat.check, parser, chat.end_ids, chat.generation_prompt)
    return asyncio.run(examine_template(template, tools and not text_mode, prompt_only=text_mode))


class PromptMeasure:
    """A function that counts the tokens of a data row's prompt, and refuses a row whose prompt does not show it whole.

    The count includes the schemas of the row's tools, unless the format is text mode, which shows none. It has not the
    first message of an interaction, which only a conversation shows.

    Args:
        model: The model.
        tools: All tools of the run, by name.
        tool_format: `multi_turn.format`.
        interactions: All interactions of the run, by name; None: it has none.

    Raises:
        ConfigError: The model has no chat template, verl has no builder for it, or there is no such format. A call
            raises it for a row that cannot be rendered, or that the template does not show whole.
    """

    def __init__(
        self,
        model: LoadedModel,
        tools: Mapping[str, Any],
        tool_format: str = "hermes",
        interactions: Mapping[str, Interaction] | None = None,
    ) -> None:
        check_format(tool_format)
        self._tokenizer, self._chat = model.tokenizer, chat_of(model, text_mode=tool_format == TIR)
        self._tools, self._interactions, self._read = tools, interactions, model.read_images
        self.reasoning_left_out = 0
        """Messages so far whose reasoning the template leaves out."""

    def __call__(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens."""
        codec, processor = self._chat.codec, self._chat.processor
        takes_images = codec.vision is not None
        raw_prompt = row_messages(row, processor) if takes_images else row["prompt"]
        given = {**row, "raw_prompt": raw_prompt}
        request = make_request(given, self._tools, {}, "row", takes_images, self._interactions)
        messages = request.messages
        if takes_images:
            messages = asyncio.run(load_images(messages, self._read, "its prompt"))
        hidden = hidden_tools(request.tools_kwargs)
        schemas = [schema_of(tool).as_dict() for name, tool in request.tools.items() if name not in hidden]
        if request.interaction is not None and not any(each["role"] == "user" for each in messages):
            messages = [*messages, {"role": "user", "content": ""}]  # some templates render no prompt without a user
        trusted = codec.trusted(messages)
        try:
            ids = codec.initial(trusted, codec.trusted_schemas(schemas))
        except MessageError as error:
            raise error.at("", len(messages) - len(trusted)) from None
        if any(message["role"] == "assistant" for message in trusted):
            self.reasoning_left_out += reasoning_left_out(trusted, self._tokenizer.decode(ids))
        return len(ids)


def check_names(codec: ChatCodec, tools: Iterable[Any]) -> None:
    """Refuse tools whose schema has a name that no model could write in a call.

    Names are those of the tool, of its arguments and of listed values. A name that holds a control token is shown to
    the model with that token broken, so the model could not write it as it is. Tools of an MCP server pass, since the
    author of the run did not choose their names: a model that calls such a name reads that there is no such tool.

    Args:
        codec: The model's codec, which shows the template's text of a schema.
        tools: The tools of the run.

    Raises:
        ConfigError: A tool has such a name.
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


def model_end_ids(tokenizer: Any) -> list[int]:
    """Return every token id that ends a turn, sorted.

    They are the tokenizer's, and those in the model's config.json and generation_config.json (Llama 3 and Qwen have
    two). SGLang knows only the model's, since verl starts it without a tokenizer. So `Runner.sampling` names them all.
    """
    name, found = tokenizer.name_or_path, {tokenizer.eos_token_id}
    for listed in (_of_config(name), _of_generation(name)):
        found |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(found - {None})


def _of_config(name: str) -> Any:
    """Return `eos_token_id` of a model's config.json; None: it has none."""
    try:
        return getattr(AutoConfig.from_pretrained(name, trust_remote_code=False), "eos_token_id", None)
    except OSError:
        return None
    except ValueError:  # it needs code of the model's own, which sets no other ids
        return PreTrainedConfig.get_config_dict(name)[0].get("eos_token_id")


def _of_generation(name: str) -> Any:
    """Return `eos_token_id` of a model's generation_config.json; None: it has none."""
    try:
        return GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):
        return None
