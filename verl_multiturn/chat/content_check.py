"""The rule that a prompt shows its messages and tools: each of their texts is looked up in the template's output.

The texts looked up are the text of each message, names and arguments of calls, answers of tools, names and descriptions
of tools, and the token that begins each prompt. White space at the ends of a text does not count, nor does how a
template writes a value: as JSON, as Python, between tags. Ids of calls need not be shown, nor reasoning, which many
templates leave out of earlier turns.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.chat.control_tokens import text_parts
from verl_multiturn.chat.images import Message
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, THINK
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.describe import show

_SHOWN = 120
_OTHER_TEMPLATE = "or use another chat template"


class ShownText:
    """A prompt as the template wrote it, in which texts are looked for from the beginning to the end.

    A text that the messages have twice must be in it twice.

    Args:
        text: The prompt.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found: Counter[str] = Counter()

    def has(self, said: str) -> bool:
        """Return whether the prompt holds a text, white space at its ends aside.

        The search begins behind the last text found. Some templates write texts in another order, so it begins anew at
        the beginning if that finds nothing.
        """
        if not said.strip():
            return True
        for form in _forms(said.strip()):
            at = self._text.find(form, self._at)
            if at >= 0:
                self._at = at + len(form)
                self._found[form] += 1
                return True
        for form in _forms(said.strip()):
            if self._text.count(form) > self._found[form]:
                self._found[form] += 1
                return True
        return False

    def has_lines(self, said: str) -> bool:
        """Return whether the prompt holds a text, or each of its lines: a template may begin each with a mark."""
        return self.has(said) or all(self.has(line) for line in said.splitlines())

    def has_value(self, value: Any) -> bool:
        """Return whether the prompt holds a value of an argument; of a nested one, the keys and values in it."""
        if isinstance(value, Mapping):
            return all(self.has(str(key)) and self.has_value(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(map(self.has_value, value))
        if isinstance(value, str):
            return self.has(value)
        words = [json.dumps(value, default=str), str(value)]
        return any(self.has(word) for word in words)


def _forms(said: str) -> Iterator[str]:
    """Yield a text in the forms in which templates write it: as it is, and inside a JSON or Python string."""
    yield said
    if said.isascii() and said.isprintable() and not set(said) & set("\\\"'<>&"):
        return
    for escaped in (json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1]):
        yield escaped
        # Jinja's own filter `tojson` also escapes characters of HTML.
        yield "".join({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}.get(c, c) for c in escaped)
    yield repr(said)[1:-1]
    # LFM2 writes calls as Python, and escapes single quotes.
    yield said.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")


def spoken_texts(text: str) -> list[str]:
    """Return the texts of an assistant's message around its reasoning.

    Where a section is closed that was not opened, the reasoning is all text before it.
    """
    for opens, closes in REASONING_MARKS:
        begin, found, rest = text.partition(closes)
        if found and opens in begin:
            return [begin.partition(opens)[0], *spoken_texts(rest)]
        if found and (opens, closes) == THINK:
            return spoken_texts(rest)
    return [text]


def check_messages_shown(messages: Sequence[Message], text: str, with_assistant: bool = True) -> None:
    """Refuse messages that the template does not show whole.

    Args:
        messages: The messages that it was given.
        text: Its output.
        with_assistant: Whether the assistant's messages must be shown, too.

    Raises:
        MessageError: A content, or a name or an argument of a call is not in the text.
    """
    shown = ShownText(text)
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not with_assistant:
            continue
        for field, said, is_shown in _said(message, shown):
            if not is_shown:
                raise MessageError(
                    f"the chat template does not show its {field}, {show(said, _SHOWN)}; write that into the content "
                    f"of a message that it shows, {_OTHER_TEMPLATE}",
                    index,
                    str(message["role"]),
                )


def _said(message: Message, shown: ShownText) -> Iterator[tuple[str, Any, bool]]:
    """Yield each text of a message: the field, its value, and whether it is shown."""
    content = message.get("content")
    is_assistant = message.get("role") == "assistant"
    for text in [content] if isinstance(content, str) else text_parts(content):
        for spoken in spoken_texts(text) if is_assistant else [text]:
            yield "content", spoken, shown.has(spoken)
    for index, call in enumerate(message.get("tool_calls") or ()):
        function, where = call["function"], f"tool_calls[{index}].function"
        yield f"{where}.name", function["name"], shown.has(function["name"])
        arguments = function["arguments"]
        if isinstance(arguments, str):  # as a template wants them, or the model's text
            yield f"{where}.arguments", arguments, shown.has(arguments)
            continue
        for key, value in arguments.items():
            yield f"{where}.arguments", {key: value}, shown.has(str(key)) and shown.has_value(value)


def reasoning_left_out(messages: Sequence[Message], text: str) -> int:
    """Return how many messages have reasoning that the template leaves out. It is not a fault.

    Args:
        messages: The messages that the template was given.
        text: Its output.
    """
    count = 0
    for message in messages:
        content = message.get("content")
        said = content if message["role"] == "assistant" and isinstance(content, str) else ""
        inside = said
        for each in (*spoken_texts(said), *itertools.chain(*REASONING_MARKS)):
            inside = inside.replace(each, "")
        count += any(each.strip() not in text for each in (inside, message.get("reasoning_content") or ""))
    return count


def check_tools_shown(
    schemas: Sequence[Mapping[str, Any]], messages: Sequence[Message], text: str, shows_tools: bool
) -> None:
    """Refuse tools whose name or description the template does not show.

    Args:
        schemas: The tools' schemas.
        messages: The messages that the template was given.
        text: Its output.
        shows_tools: Whether it shows tools itself. Where it shows none, the author describes them in a message, and
            a name there is enough.

    Raises:
        MessageError: There is such a tool.
    """
    shown = ShownText(text if shows_tools else "\n".join(_instructions(messages)))
    for schema in schemas:
        function = schema["function"]
        if not shown.has(str(function["name"])):
            raise MessageError(
                f"the chat template does not show the tool {function['name']!r}; describe it in the system message, "
                f"{_OTHER_TEMPLATE}"
            )
        description = function.get("description")
        if shows_tools and isinstance(description, str) and not shown.has_lines(description):
            raise MessageError(
                f"the chat template does not show the description of the tool {function['name']!r}, "
                f"{show(description, _SHOWN)}; write it in another form, {_OTHER_TEMPLATE}"
            )


def _instructions(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of the system and of users."""
    for message in messages:
        if message["role"] not in ("assistant", "tool"):
            content = message.get("content")
            yield from [content] if isinstance(content, str) else text_parts(content)
