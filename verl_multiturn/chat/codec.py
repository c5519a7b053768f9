"""`ChatCodec`: messages to token ids, for the first prompt and for each observation that is appended later.

The codec wraps a Continuous Token builder of verl. Its caller hands the builder in: `chat` does not import verl.
Sampled tokens are never rendered again. Only the messages after them are rendered, and only their images processed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from verl_multiturn.chat.clipping import Encoder, Side, clip
from verl_multiturn.chat.control_tokens import Firewall, map_texts, text_parts
from verl_multiturn.chat.first_prompts import FirstPrompts, RequiredPart, Write
from verl_multiturn.chat.images import Vision, images_of, stand_in, with_images
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall
from verl_multiturn.chat.template_form import TemplateForm
from verl_multiturn.chat.tool_schemas import announcement, sealed, texts
from verl_multiturn.errors import ConfigError

Message = dict[str, Any]
Result = TypeVar("Result")

# How many of the last ids a builder gets. It needs the last token or two; with the whole history, the cost of a turn
# would grow with the conversation.
_TAIL = 16
# The most lists of schemas whose cleaned form is remembered. The requests of a run have few different lists.
_MOST_SCHEMAS = 256


class TokenBuilder(Protocol):
    """The part of `verl.utils.tokenizer.continuous_token.ContinuousTokenBuilder` that the codec uses."""

    def build_initial_tokens(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **images: Any
    ) -> list[int]:
        """Return the ids of a first prompt, with the header of the assistant's turn at the end."""
        ...

    def merge_context_tokens(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Return the ids so far with those of the new messages appended.

        The returned object has `token_ids`, `inserted_token_ids` (the separator after the turn) and
        `removed_prefix_token_count` (how many of the last ids so far the builder removed).
        """
        ...


class Tokenizer(Encoder, Protocol):
    """The part of a Hugging Face tokenizer that the codec uses."""

    def decode(self, token_ids: Any, /) -> Any:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True)
class Increment:
    """Tokens to append after a sampled turn."""

    separator: list[int]
    """Ids that the template writes between the turn's end token and the next message."""
    observation: list[int]
    """Ids of the new messages, with the header of the next assistant turn."""

    def __len__(self) -> int:
        return len(self.separator) + len(self.observation)


class ChatCodec:
    """A codec that renders messages with one model's chat template.

    Args:
        builder: verl's builder for the model.
        end_ids: Token ids that end a turn, for a builder that does not restore the separator itself.
        separator: Ids that the template writes after a turn's end token (in ChatML a newline), for the same builders.
            The model stops at the end token and never samples the separator.
        firewall: Cleans the text of rows, tools and users; None for a tokenizer without control tokens.
        tokenizer: Counts the tokens for `clip`, and reads a schema as the template writes it; None where no limit
            counts tokens.
        vision: The model's placeholder tokens; None for a model that takes no images.
        write: Writes first prompts with the header of the assistant's turn at the end, as the builder does; None for a
            builder without a template, whose prompts are not looked at.
    """

    def __init__(
        self,
        builder: TokenBuilder,
        end_ids: Sequence[int] = (),
        separator: Sequence[int] = (),
        firewall: Firewall | None = None,
        tokenizer: Tokenizer | None = None,
        vision: Vision | None = None,
        write: Write | None = None,
    ) -> None:
        self.vision = vision
        self._prompts = None if write is None else FirstPrompts(write, getattr(tokenizer, "bos_token", None))
        self._builder = builder
        self._tokenizer = tokenizer
        self._firewall = firewall
        self._end_ids = frozenset(end_ids)
        self._separator = list(separator)
        self._shown: dict[str, list[dict[str, Any]]] = {}
        self._observes_schemas = True

    async def render(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """Call one of the methods below: here, or for a model that takes images in the thread of its processor."""
        if self.vision is None:
            return method(*arguments)
        return await self.vision.run(method, *arguments)

    @cached_property
    def form(self) -> TemplateForm:
        """Return the form in which the template takes messages."""
        return TemplateForm(self)

    def trusted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of rows, tools or users in the template's form, with all control tokens in their text broken.

        This includes text that would become a control token only together with the template's text or the next message.
        Pass every argument of `initial` and `observation` through here first.

        Raises:
            MessageError: A message has a field that the template does not show.
        """
        messages = self.form.row(messages)
        firewall = self._firewall
        if firewall is None:
            return messages
        cleaned = [firewall.clean_message(message) for message in messages]
        for message, following in itertools.pairwise(cleaned):
            if firewall.joins(message.get("content"), following.get("content")):
                message["content"] = firewall.seal(message["content"])
        return [self._parted(message, firewall) for message in cleaned]

    def trusted_schemas(self, schemas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return tool schemas in the template's form, with all control tokens in their text broken.

        This includes text that would become a control token only together with the template's text. Pass every
        argument of `initial` and `observation` through here first. Results are remembered.
        """
        schemas = self.form.tools(schemas) if schemas else schemas
        firewall = self._firewall
        if firewall is None or not schemas:
            return list(schemas)
        key = json.dumps(schemas)
        if key not in self._shown:
            if len(self._shown) >= _MOST_SCHEMAS:
                self._shown.clear()
            self._shown[key] = self._harmless_schemas(schemas, firewall)
        return self._shown[key]

    def _harmless_schemas(self, schemas: Sequence[dict[str, Any]], firewall: Firewall) -> list[dict[str, Any]]:
        """Clean the schemas, and seal their texts if the template would join one of them to a control token."""
        cleaned = [firewall.clean_schema(schema) for schema in schemas]
        if not any(map(firewall.may_join, texts(cleaned))):
            return cleaned
        parted = sealed(cleaned, firewall)
        prompt: list[Message] = [{"role": "user", "content": "x"}]
        try:
            counts = [firewall.count(self._build(prompt, each)) for each in (cleaned, parted)]
        except Exception:  # a template is other people's code; sealing without need is safe
            return parted
        return cleaned if counts[0] == counts[1] else parted

    def _parted(self, message: Message, firewall: Firewall) -> Message:
        """Seal a message's text, or the names in its calls, if the template would join it to a control token."""
        content = message.get("content")
        role = str(message.get("role"))
        if message.get("tool_calls"):
            named = {**message, "tool_calls": firewall.seal_names(message["tool_calls"])}
            if named != message and self._brings_in(message, named, firewall, role):
                message = named
        texts = [content] if isinstance(content, str) else text_parts(content)
        if not any(firewall.may_join(text, role) for text in texts):
            return message
        sealed = {**message, "content": firewall.seal(content)}
        harmless = {**message, "content": map_texts(content, lambda _: "x")}
        return sealed if self._brings_in(message, harmless, firewall, role) else message

    def _brings_in(self, message: Message, harmless: Message, firewall: Firewall, role: str) -> bool:
        """Return whether a message renders with another number of control tokens than a harmless form of it."""
        try:
            counts = [firewall.count(self._render_alone(each, role), role) for each in (message, harmless)]
        except Exception:  # a template is other people's code; sealing without need is safe
            return True
        return counts[0] != counts[1]

    def _render_alone(self, message: Message, role: str) -> list[int]:
        """Return the ids of a message in the smallest conversation that the template can render."""
        images = images_of([message])
        (message,) = with_images([message], [stand_in()] * len(images)) if images else (message,)
        if role == "tool":
            function: dict[str, Any] = {"name": message.get("name") or "x", "arguments": {}}
            call = {"id": message.get("tool_call_id") or "x", "type": "function", "function": function}
            asked: list[Message] = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            return list(self._builder.merge_context_tokens(asked, [*asked, message], []).token_ids)
        before: list[Message] = [] if role in ("system", "user") else [{"role": "user", "content": "x"}]
        after: list[Message] = [{"role": "user", "content": "x"}] if role != "user" else []
        return self._build([*before, message, *after], None)

    def _build(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        images = images_of(messages)
        given = {"images": images} if images else {}
        return list(self._builder.build_initial_tokens(messages, tools=tools, **given))

    def _check_images(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        images = len(images_of(messages))
        if self.vision is None:
            if images:
                raise ConfigError(f"the model takes none of the {images} images; use a vision-language model")
        elif (groups := self.vision.count(ids)) != images:
            raise ConfigError(
                f"the chat template writes placeholders for {groups} images where the messages have {images}; use a "
                "template that shows images in the messages of every role that has some"
            )

    def clip(self, text: str, tokens: int, side: Side) -> tuple[str, bool]:
        """Cut a text to at most `tokens` tokens, as `clipping.clip` does.

        Args:
            text: A text that `harmless` returned.
            tokens: The most tokens that the result may have.
            side: Where a longer text loses its text.

        Returns:
            The text, and whether it was cut.

        Raises:
            ConfigError: This codec was made without a tokenizer.
        """
        if self._tokenizer is None:
            raise ConfigError("a limit in tokens needs a tokenizer, and this codec was made without one")
        clipped = clip(text, tokens, side, self._tokenizer)
        return clipped, clipped != text

    def harmless(self, text: str) -> str:
        """Return the text of a tool with all control tokens in it broken."""
        return self._firewall.clean(text) if self._firewall is not None else text

    def announcement(self, schemas: Sequence[dict[str, Any]]) -> str:
        """Return the text that announces further tools to the model, in the middle of a conversation.

        Args:
            schemas: The tools' schemas, not empty.
        """
        cleaned = self.trusted_schemas(schemas)
        return announcement(cleaned, self._schema_prompt, self.harmless)

    def _schema_prompt(self, schemas: Sequence[dict[str, Any]]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(self._build([{"role": "user", "content": "x"}], list(schemas))))

    def initial(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], check: RequiredPart = RequiredPart.ALL
    ) -> list[int]:
        """Return the ids of the first prompt, with the header of the assistant's turn at the end.

        Args:
            messages: The messages so far, as `trusted` returns them.
            schemas: The tools' schemas, as `trusted_schemas` returns them; empty without tools.
            check: The part of the messages that must be in the prompt.

        Raises:
            ConfigError: The template cannot render the messages, does not show their text, or writes placeholders
                for more or fewer images than they have.
        """
        if check is RequiredPart.NOTHING or self._prompts is None:
            return self.rendered(messages, schemas)
        self._prompts.check(messages, schemas, check)
        return self._ids(messages, schemas)

    def rendered(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt as `initial` does, without the check that it shows the messages."""
        if self._prompts is not None:
            self._prompts.write(messages, schemas)
        return self._ids(messages, schemas)

    def _ids(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        try:
            ids = self._build(list(messages), list(schemas) or None)
        except Exception as error:  # a template is other people's code and may raise anything
            raise ConfigError(
                f"the chat template cannot render the prompt: {error}; change its messages, or use another chat "
                "template"
            ) from error
        self._check_images(ids, messages)
        return ids

    def observation(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> Increment:
        """Return the tokens that new messages append after `ids`, up to and with the next assistant header.

        Sampled ids stay unchanged. In some families (GLM) a turn ends with the first token of the next message: that
        token is not written twice. Where the model sampled a different token than the observation begins with, both
        are kept.

        verl's builder gets the last ids only, and returns them with the new ones. Example for ChatML:

            ids              … 4 2 <|im_end|>
            merged ids       4 2 <|im_end|>  newline     <|im_start|> tool …
                             (kept)          (separator) (observation)

        Args:
            before: The messages so far. The last one is the assistant's turn.
            added: New messages of tools or users, as `trusted` returns them.
            ids: All ids so far, up to and with the sampled ids of that turn.
            schemas: The tools' schemas, as `trusted_schemas` returns them.

        Raises:
            ConfigError: The template cannot render the messages, changes tokens that the engine sampled, or writes
                placeholders for more or fewer images than the new messages have.
        """
        tail = list(ids[-_TAIL:])
        merged = self._merge(_stub(before), list(added), tail, schemas if self._observes_schemas else ())
        merged_ids = list(merged.token_ids)
        kept = len(tail)
        if merged_ids[:kept] != tail:
            kept -= merged.removed_prefix_token_count
        if kept < len(tail) - 1 or merged_ids[:kept] != tail[:kept]:
            raise ConfigError(
                f"the chat template family {type(self._builder).__name__} rewrites sampled tokens at a turn boundary "
                f"(…{tail[-3:]} became …{merged_ids[len(tail) - 3 : len(tail)]}), which would train on tokens the "
                "model never saw; use a model whose template only appends"
            )
        added_ids = merged_ids[kept:]
        self._check_images(added_ids, added)
        inserted = len(merged.inserted_token_ids)
        separator = added_ids[:inserted]
        if not separator and tail[-1] in self._end_ids:
            separator = list(self._separator)
        return Increment(separator=separator, observation=added_ids[inserted:])

    def forget_schemas(self, schema: dict[str, Any], end_ids: Sequence[int]) -> bool:
        """Leave the tools' schemas out of observations from now on, if that does not change the observations' tokens.

        An observation then costs the same with many tools as with none.

        Args:
            schema: Schema of one tool, to try this with.
            end_ids: Token ids that end a turn. The first one that works with the template is used.

        Returns:
            Whether the schemas are omitted from now on.
        """
        function = schema["function"]
        two = [schema, {**schema, "function": {**function, "name": "other"}}]
        call = {"type": "function", "function": {"name": function["name"], "arguments": {}}}
        calls = [{"id": f"call0000{index}", **call} for index in range(2)]
        answers: list[Message] = [
            {"role": "tool", "content": "a", "tool_call_id": each["id"], "name": function["name"]} for each in calls
        ]
        user: Message = {"role": "user", "content": "u"}
        said: Message = {"role": "assistant", "content": "x"}
        cases: list[tuple[Message, list[Message]]] = [
            (said, [user]),
            *(({**said, "tool_calls": calls[:count]}, answers[:count]) for count in (1, 2)),
            ({**said, "tool_calls": calls}, [*answers, user]),
        ]
        self._observes_schemas = True
        for end_id in end_ids:
            found, without = ([self._try(*case, end_id, schemas) for case in cases] for schemas in (two, []))
            if any(found):
                self._observes_schemas = found != without
                break
        return not self._observes_schemas

    def _try(
        self, before: Message, added: list[Message], end_id: int, schemas: Sequence[dict[str, Any]]
    ) -> Increment | None:
        try:
            return self.observation([{"role": "user", "content": "u"}, before], added, [end_id], schemas)
        except ConfigError:
            return None

    def _merge(
        self, before: list[Message], added: list[Message], tail: list[int], schemas: Sequence[dict[str, Any]]
    ) -> Any:
        """Append messages with the builder, several tool responses as one where the template takes no more than one."""
        tools = list(schemas) or None
        try:
            return self._builder.merge_context_tokens(before, [*before, *added], tail, tools=tools)
        except Exception as error:  # a template is other people's code and may raise anything
            if len(added) > 1 and all(message.get("role") == "tool" for message in added):
                return self._merge(before, [_joined(added)], tail, schemas)
            role = added[0].get("role")
            raise ConfigError(f"the chat template cannot render {role!r} messages: {error}") from error


def _stub(before: Sequence[Message]) -> list[Message]:
    """Return the smallest conversation that a template needs to render the next messages.

    Some builders render `before`, too. With the whole history the cost of a turn would grow with the conversation, and
    a builder would raise for a model's text.
    """
    last: Message = {"role": "assistant", "content": "x"}
    calls = before[-1].get("tool_calls") if before else None
    if calls:
        names = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
        last = {"role": "assistant", "content": "", "tool_calls": names}
    return [{"role": "user", "content": "x"}, last]


def _joined(messages: Sequence[Message]) -> Message:
    """Join several tool responses into one message, for a template that takes no more than one."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": "\n".join(contents)}
    blocks: list[Any] = []
    for content in contents:
        blocks += [{"type": "text", "text": "\n"}] if blocks else []
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**messages[0], "content": blocks}


def assistant_message(turn: AssistantTurn) -> Message:
    """Convert a turn to a message for the chat template.

    A malformed call becomes a call of the tool `error` without arguments.
    """
    message: Message = {"role": "assistant", "content": turn.content}
    calls = []
    for call in turn.calls:
        name, arguments = ("error", {}) if isinstance(call, MalformedCall) else (call.name, _arguments(call.arguments))
        calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(text: str) -> Any:
    """Return a call's arguments as the mapping that templates expect. Text that is not a JSON object stays text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
