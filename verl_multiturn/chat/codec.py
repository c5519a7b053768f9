"""Messages to token ids: the initial prompt, and the increment that an observation adds.

Wraps a Continuous Token builder of verl (it is handed in: this room does not import verl). What the engine sampled is
never rendered again; only what comes after it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_multiturn.errors import ConfigError

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
    """

    def __init__(self, builder: TokenBuilder, end_ids: Sequence[int] = (), separator: Sequence[int] = ()) -> None:
        self._builder = builder
        self._end_ids = frozenset(end_ids)
        self._separator = list(separator)

    def initial(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the first prompt, the assistant's header included.

        Raises:
            ConfigError: the template cannot render the messages.
        """
        try:
            return list(self._builder.build_initial_tokens(list(messages), tools=list(schemas) or None))
        except ValueError as error:
            raise ConfigError(f"the chat template cannot render the prompt: {error}") from error

    def observation(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> Increment:
        """What `added` messages (tool or user) append after `ids`, up to and with the next assistant header.

        Raises:
            ConfigError: the template family rewrites tokens that the engine sampled.
        """
        tail = list(ids[-_TAIL:])
        try:
            merged = self._builder.merge_context_tokens(
                list(before), [*before, *added], tail, tools=list(schemas) or None
            )
        except ValueError as error:
            raise ConfigError(f"the chat template cannot render {added[0].get('role')!r} messages: {error}") from error
        if merged.token_ids[: len(tail)] != tail:
            raise ConfigError(
                f"the chat template family {type(self._builder).__name__} rewrites sampled tokens at a turn boundary "
                f"(…{tail[-3:]} became …{merged.token_ids[len(tail) - 3 : len(tail)]}), which would train on tokens "
                "the model never saw; use a model whose template only appends"
            )
        added_ids = merged.token_ids[len(tail) :]
        inserted = len(merged.inserted_token_ids)
        separator = added_ids[:inserted]
        if not separator and tail[-1] in self._end_ids:
            separator = list(self._separator)
        return Increment(separator=separator, observation=added_ids[inserted:])
