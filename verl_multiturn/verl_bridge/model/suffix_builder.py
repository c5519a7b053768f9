"""verl's token builder, asked for the end of a text alone.

verl's builder renders each observation behind a small conversation that never changes, tokenizes that prefix and the
whole, and takes the prefix's ids away. `suffix_builder` gives a builder of the same class that keeps the prefix's text
and tokenizes only what stands behind it.

Invariants:
- the ids are those of verl's own way. Where that is not certain, verl's own way is gone.

Why the ids are the same: a tokenizer first cuts a text at its added tokens, and then treats each piece by itself. So
nothing merges across the place where the suffix begins if an added token always stands there:
- the prefix's text is a prefix of the whole text, as it is rendered now;
- the suffix begins with an added token that is found in the text as it is (`normalized` is false, or the tokenizer
  normalizes nothing), and that needs nothing of what stands before it (`lstrip` and `single_word` are false);
- no added token can begin in the prefix and end in the suffix.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from verl_multiturn.chat.encoding import Encode, encoder, is_wrapper

Message = dict[str, Any]

# The most prefixes whose text is kept. A run has one for each tool, number of calls and call id.
_MOST_PREFIXES = 1024
# How the library shows a normalizer that leaves every text as it is.
_NO_NORMALIZER = ("None", "Sequence(normalizers=[])")


def suffix_builder(builder: Any) -> Any:
    """Return a builder that tokenizes only suffixes, for the codec of a run's model.

    Args:
        builder: A builder that verl made.

    Returns:
        A builder that gives the same ids; the given one where it tokenizes in a way of its own, as those for images do.
    """
    family = type(builder)
    own = _overridden(family) & {"render_delta_token_id", "_render_tokens"}
    if own or not is_wrapper(builder.tokenizer) or builder.tokenizer.split_special_tokens:
        return builder
    # The family's name stays, since errors show it.
    made = type(family.__name__, (_SuffixBuilder, family), {})
    return made(builder.tokenizer, chat_template_kwargs=builder.chat_template_kwargs)


def _overridden(family: type[Any]) -> set[str]:
    """Return the names that a class or its bases before `ContinuousTokenBuilder` define."""
    before = family.__mro__[: family.__mro__.index(ContinuousTokenBuilder)]
    return {name for each in before for name in vars(each)}


class _SuffixBuilder(ContinuousTokenBuilder):
    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self._prefixes: dict[str, str] = {}

    def render_delta_token_id(
        self,
        prefix_messages: list[Message],
        appended_messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids that messages append after a prefix, as verl's builder does."""
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        suffix = self._suffix(prefix_messages, appended_messages, **given)
        if suffix is None:
            return list(super().render_delta_token_id(prefix_messages, appended_messages, **given))
        return self._encode(suffix)

    def _suffix(
        self, prefix: list[Message], appended: list[Message], *, add_generation_prompt: bool, tools: Any
    ) -> str | None:
        """Return the text behind the prefix; None where it may not be tokenized alone."""
        if not appended:  # the prefix is then the conversation itself, and differs each time
            return None
        try:
            whole = self._text([*prefix, *appended], add_generation_prompt, tools)
            before = self._prefix(prefix, tools, whole)
        except Exception:  # a template is other people's code; verl's own way has an answer to some of its errors
            return None
        if before is None:
            return None
        return whole[len(before) :] if self._openings.match(whole, len(before)) else None

    def _prefix(self, messages: list[Message], tools: Any, whole: str) -> str | None:
        """Return a prefix's text; None where the whole does not begin with it, or an added token may go on behind it.

        Which prefix it is, is told by all that the template gets of it.
        """
        key = repr((messages, tools))
        text = self._prefixes.get(key)
        if text is not None and whole.startswith(text):
            return text
        text = self._text(messages, False, tools)  # anew, since a template may write the time of day
        if not whole.startswith(text) or any(text[-size:] in self._heads for size in self._head_sizes):
            return None
        if len(self._prefixes) >= _MOST_PREFIXES:
            self._prefixes.clear()
        self._prefixes[key] = text
        return text

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

    @cached_property
    def _encode(self) -> Encode:
        return encoder(self.tokenizer)

    @cached_property
    def _openings(self) -> re.Pattern[str]:
        """The added tokens that are found wherever they stand, whatever stands before and behind them."""
        added = list(self.tokenizer.added_tokens_decoder.values())
        firm = {each.content for each in added if self._is_firm(each)}
        others = [each.content for each in added if each.content not in firm]
        # A longer token that is not always found must not begin where the shorter one does.
        sure = [token for token in firm if not any(other.startswith(token) for other in others)]
        return re.compile("|".join(map(re.escape, sorted(sure, key=len, reverse=True))) or r"(?!)")

    def _is_firm(self, added: Any) -> bool:
        if added.lstrip or added.single_word or not added.content:
            return False
        if not added.normalized:
            return True
        # It is looked for in the normalized text, and after those that are not normalized.
        text, others = added.content, self.tokenizer.added_tokens_decoder.values()
        shared = any(text[at:] in self._heads for at in range(1, len(text)))
        shared = shared or any(each.content in text for each in others if each.content != text)
        return not shared and repr(self.tokenizer.backend_tokenizer.normalizer) in _NO_NORMALIZER

    @cached_property
    def _heads(self) -> frozenset[str]:
        """The beginnings of all added tokens, without the whole tokens."""
        added = [each.content for each in self.tokenizer.added_tokens_decoder.values()]
        return frozenset(token[:size] for token in added for size in range(1, len(token)))

    @cached_property
    def _head_sizes(self) -> range:
        return range(1, max(map(len, self._heads), default=0) + 1)
