"""A codec over a family's own chat template, without verl: for first prompts, not for observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.families import family
from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.control_tokens import Firewall


class TemplateBuilder:
    """A `TokenBuilder` that renders first prompts with a tokenizer's template, and appends nothing.

    Args:
        tokenizer: The tokenizer, with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def write(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        """Return a first prompt as text."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=list(schemas) or None, add_generation_prompt=True, tokenize=False
            )
        )

    def build_initial_tokens(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **images: Any
    ) -> list[int]:
        """Return the ids of a first prompt."""
        return list(self._tokenizer.encode(self.write(messages, tools or []), add_special_tokens=False))

    def merge_context_tokens(self, *given: Any, **more: Any) -> Any:
        """Refuse to append."""
        raise ValueError("first prompts only")


def prompt_codec(name: str) -> ChatCodec:
    """Return a codec that renders the first prompts of a family."""
    tokenizer = family(name).tokenizer
    builder = TemplateBuilder(tokenizer)
    return ChatCodec(builder, firewall=Firewall(tokenizer), tokenizer=tokenizer, write=builder.write)
