"""Messages to token ids: the initial prompt, and the increment that an observation adds.

Wraps a Continuous Token builder of verl (it is handed in: this room does not import verl). What the engine sampled is
never rendered again; only what comes after it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_multiturn.chat.clipping import Encoder, clip
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsers import AssistantTurn, MalformedCall
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.limits import Side

Message = dict[str, Any]

# A builder's edits at the junction look at the last token or two; handing it the whole history would make the cost of
# a turn grow with the conversation.
_TAIL = 16


class TokenBuilder(Protocol):
    """What is used of `verl.utils.tokenizer.continuous_token.ContinuousTokenBuilder`."""

    def build_initial_tokens(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]: ...

    def merge_context_tokens(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any: ...


@dataclass(frozen=True)
class Increment:
    """Tokens to append: the template's separator after a sampled turn, then the observation with the next header."""

    separator: list[int]
    observation: list[int]

    def __len__(self) -> int:
        return len(self.separator) + len(self.observation)


class ChatCodec:
    """Renders messages with one model's chat template.

    Args:
        builder: verl's builder for the model.
        end_ids, separator: what the template writes after a turn's end token (ChatML: a newline), for a builder that
            does not restore it itself; the model stops at the end token and never samples it.
        firewall: what `trusted` uses; None for a tokenizer without control tokens.
        tokenizer: what `clip` counts with.
    """

    def __init__(
        self,
        builder: TokenBuilder,
        end_ids: Sequence[int] = (),
        separator: Sequence[int] = (),
        firewall: Firewall | None = None,
        tokenizer: Encoder | None = None,
    ) -> None:
        self._builder = builder
        self._tokenizer = tokenizer
        self._firewall = firewall
        self._end_ids = frozenset(end_ids)
        self._separator = list(separator)

    def trusted(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of rows, tools or users in which no text is, or joins the template to become, a control token.

        What `initial` and `observation` are given has to come through here.
        """
        firewall = self._firewall
        if firewall is None:
            return list(messages)
        cleaned = [firewall.clean_message(message) for message in messages]
        return [self._parted(message, firewall) for message in cleaned]

    def _parted(self, message: Message, firewall: Firewall) -> Message:
        """The message, its text parted from the template's where the two together form a token."""
        content = message.get("content")
        role = str(message.get("role"))
        if not isinstance(content, str) or not firewall.may_join(content, role):
            return message
        try:
            with_text, without = (self._render_alone({**message, "content": text}, role) for text in (content, "x"))
        except Exception:  # templates are programs of others; parted for nothing is safe
            return {**message, "content": firewall.seal_ends(content)}
        if firewall.count(with_text, role) == firewall.count(without, role):
            return message
        return {**message, "content": firewall.seal_ends(content)}

    def _render_alone(self, message: Message, role: str) -> list[int]:
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
        return list(self._builder.build_initial_tokens([*before, message, *after]))

    def clip(self, text: str, tokens: int, side: Side) -> str:
        """A text without control tokens, and within `tokens` tokens, as `clipping.clip` cuts it."""
        if self._tokenizer is None:
            raise ConfigError("a limit in tokens needs a tokenizer, and this codec was made without one")
        clean = self._firewall.clean(text) if self._firewall is not None else text
        return clip(clean, tokens, side, self._tokenizer)

    def initial(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the first prompt, the assistant's header included.

        Raises:
            ConfigError: the template cannot render the messages.
        """
        try:
            return list(self._builder.build_initial_tokens(list(messages), tools=list(schemas) or None))
        except Exception as error:  # templates are programs of others, and raise what they like
            raise ConfigError(f"the chat template cannot render the prompt: {error}") from error

    def observation(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> Increment:
        """What `added` messages (tool or user) append after `ids`, up to and with the next assistant header.

        What was sampled stays as it is. Where a family's turns end with the next message's first token (GLM), that
        token is not written twice; where the model sampled another one than the observation begins with, both stand.

        Raises:
            ConfigError: the template cannot render the messages, or rewrites tokens that the engine sampled.
        """
        tail = list(ids[-_TAIL:])
        merged = self._merge(list(before), list(added), tail, schemas)
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
        inserted = len(merged.inserted_token_ids)
        separator = added_ids[:inserted]
        if not separator and tail[-1] in self._end_ids:
            separator = list(self._separator)
        return Increment(separator=separator, observation=added_ids[inserted:])

    def _merge(
        self, before: list[Message], added: list[Message], tail: list[int], schemas: Sequence[dict[str, Any]]
    ) -> Any:
        tools = list(schemas) or None
        try:
            return self._builder.merge_context_tokens(before, [*before, *added], tail, tools=tools)
        except Exception as error:  # templates are programs of others, and raise what they like
            if len(added) > 1 and all(message.get("role") == "tool" for message in added):
                return self._merge(before, [_joined(added)], tail, schemas)
            role = added[0].get("role")
            raise ConfigError(f"the chat template cannot render {role!r} messages: {error}") from error


def _joined(messages: Sequence[Message]) -> Message:
    """Several answers of tools as one, for a template that takes no more than one."""
    return {**messages[0], "content": "\n".join(str(message["content"]) for message in messages)}


def assistant_message(turn: AssistantTurn) -> Message:
    """A turn as a message for the chat template."""
    message: Message = {"role": "assistant", "content": turn.content}
    calls = []
    for call in turn.calls:
        name, arguments = ("error", {}) if isinstance(call, MalformedCall) else (call.name, _arguments(call.arguments))
        calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(text: str) -> Any:
    """Templates expect a mapping; what the model wrote instead stays text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
