"""verl's token builder, for the end of a text alone.

verl's builder renders each observation behind a small conversation that never changes, tokenizes that prefix and the
whole, and takes the prefix's ids away. `suffix_builder` gives a builder of the same class that keeps the prefix's text
and tokenizes only the text behind it.

Invariants:
- the ids are those of verl's own way. Where the prefix's text does not begin the whole, or the rest does not begin at
  a seam (`chat/encoding.py`), verl's own way is gone.
"""

from __future__ import annotations

from typing import Any

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from verl_multiturn.chat.encoding import SeamEncoder, is_wrapper

Message = dict[str, Any]

_OWN = {"render_delta_token_id", "_render_tokens", "build_initial_tokens"}
# Settings of a template that change its ids, and not its text.
_TOKENIZING = {"truncation", "max_length", "padding", "tokenizer_kwargs"}
# The most prefixes whose text is kept. A run has one for each tool, number of calls and call id.
_MOST_PREFIXES = 1024


def suffix_builder(builder: Any, seams: SeamEncoder) -> Any:
    """Return a builder that tokenizes only suffixes, for the codec of a run's model.

    Args:
        builder: A builder that verl made.
        seams: The encoder of the builder's tokenizer.

    Returns:
        A builder that gives the same ids; the given one where it tokenizes in a way of its own, as those for images do.
    """
    family = type(builder)
    before = family.__mro__[: family.__mro__.index(ContinuousTokenBuilder)]
    has_own_way = any(_OWN & vars(each).keys() for each in before) or _TOKENIZING & builder.chat_template_kwargs.keys()
    if has_own_way or not is_wrapper(builder.tokenizer):
        return builder
    # The family's name stays, since errors show it.
    made = type(family.__name__, (_SuffixBuilder, family), {"seams": seams})
    return made(builder.tokenizer, chat_template_kwargs=builder.chat_template_kwargs)


class _SuffixBuilder(ContinuousTokenBuilder):
    seams: SeamEncoder

    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self._prefixes: dict[str, str] = {}

    def build_initial_tokens(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Return the ids of a first prompt, as verl's builder does."""
        try:
            text = self._text(messages, True, tools)
        except Exception:  # a template is other people's code; verl's own way has an answer to some of its errors
            return list(super().build_initial_tokens(messages, tools=tools, **media))
        return self.seams.prompt(text)

    def render_delta_token_id(
        self,
        prefix_messages: list[Message],
        appended_messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids that messages append after a prefix, as verl's builder does."""
        suffix = None
        if appended_messages:  # else the prefix is the conversation itself, and differs each time
            suffix = self._suffix(prefix_messages, appended_messages, add_generation_prompt, tools)
        if suffix is not None:
            return self.seams.encode(suffix)
        given: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return list(super().render_delta_token_id(prefix_messages, appended_messages, **given))

    def _suffix(
        self, prefix: list[Message], appended: list[Message], add_generation_prompt: bool, tools: Any
    ) -> str | None:
        """Return the text behind the prefix; None where it may not be tokenized alone."""
        key = repr((prefix, tools))  # all that the template gets of the prefix
        try:
            whole = self._text([*prefix, *appended], add_generation_prompt, tools)
            text = self._prefixes.get(key)
            if text is None or not whole.startswith(text):  # a template may write the time of day
                text = self._text(prefix, False, tools)
        except Exception:  # as above
            return None
        if not whole.startswith(text) or not self.seams.is_seam(whole, len(text)):
            return None
        if len(self._prefixes) >= _MOST_PREFIXES:
            self._prefixes.clear()
        self._prefixes[key] = text
        return whole[len(text) :]

    def _text(self, messages: list[Message], add_generation_prompt: bool, tools: Any) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self.chat_template_kwargs,
            )
        )
