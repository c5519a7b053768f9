"""The rows that `benchmarks.rows` tries: contents in each role and place, the assistant last or first, tools.

Each text has words that occur nowhere else. A case is honest where an author may well write such a row, by hand or by a
library that stores it; a prompt that could show it must then show it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.long.tokens.row_histories import answer_cases, call_cases, history_cases, key_cases, reasoning_cases
from tests.long.tokens.row_parts import RICH, Case, Message, Words, dialogue
from tests.long.tokens.row_words import MARK

# Name → a function that makes the content of a message, and whether it is honest.
_CONTENTS: dict[str, tuple[Callable[[Words], Any], bool]] = {
    "text": (lambda w: w.text(), True),
    "rich text": (lambda w: w.text(RICH), True),
    "text with white space around it": (lambda w: f"\n  {w.text()}\n\n", True),
    "text with a control token": (lambda w: f"{w.text()} <|im_end|> </s> {w.text()}", True),
    "JSON text": (lambda w: json.dumps({"a": w.text(), "b": None}), True),
    "text of Windows": (lambda w: f"{w.text()}\r\n\r\n{w.text()}\r\nend", True),
    "text of a template": (lambda w: f"{{{{ {w.mark()} }}}} {{% raw %}} {w.text()} {{# {w.mark()} #}}", True),
    "text like an answer": (lambda w: f"<tool_response>\n{w.text()}\n</tool_response>", True),
    "text of other alphabets": (lambda w: f"e\u0301 {w.mark()} \u202b{w.mark()}\u00a0\u3000 👩‍👩‍👧 {w.mark()}", True),
    "very long text": (lambda w: " ".join(w.mark() for _ in range(700)), True),
    "block": (lambda w: [w.block()], True),
    "rich block": (lambda w: [{"type": "text", "text": w.text(RICH)}], True),
    "two blocks": (lambda w: [w.block(), w.block()], True),
    "five blocks": (lambda w: [w.block() for _ in range(5)], True),
    "block and empty block": (lambda w: [{"type": "text", "text": ""}, w.block(), {"type": "text", "text": ""}], True),
    "block with white space": (lambda w: [{"type": "text", "text": f" \n{w.text()}\n "}, w.block()], True),
    "blocks with nulls": (
        lambda w: [w.block(image_url=None, cache_control=None), w.block(image=None, video=None)],
        True,
    ),
    "very long block": (lambda w: [{"type": "text", "text": " ".join(w.mark() for _ in range(700))}], True),
    "tuple of blocks": (lambda w: (w.block(), w.block()), False),
    "block with more keys": (lambda w: [w.block(cache_control={"type": "ephemeral"}), w.block(annotations=[])], False),
    "list of strings": (lambda w: [w.text(), w.text()], False),
    "strings and blocks": (lambda w: [w.text(), w.block(), w.text()], False),
    "block without a type": (lambda w: [{"text": w.text()}], False),
    "block input_text": (lambda w: [{"type": "input_text", "text": w.text()}], False),
    "block output_text": (lambda w: [{"type": "output_text", "text": w.text()}], False),
    "block of an unknown type": (lambda w: [w.block(), {"type": "poem", "poem": w.text()}], False),
    "block with content for text": (lambda w: [{"type": "text", "content": w.text()}], False),
    "block with a list for text": (lambda w: [{"type": "text", "text": [w.text()]}], False),
    "block with a value for text": (
        lambda w: [{"type": "text", "text": {"value": w.text(), "annotations": []}}],
        False,
    ),
    "block json": (lambda w: [{"type": "json", "json": {"a": w.text()}}], False),
    "block refusal": (lambda w: [{"type": "refusal", "refusal": w.text()}], False),
    "block tool_result": (lambda w: [{"type": "tool_result", "tool_use_id": "t", "content": w.text()}], False),
    "block tool_use": (lambda w: [{"type": "tool_use", "id": "t", "name": w.mark(), "input": {"a": w.text()}}], False),
    "block document": (lambda w: [{"type": "document", "source": {"type": "text", "data": w.text()}}], False),
    "block of other case": (lambda w: [{"type": "Text", "text": w.text()}], False),
    "block with text null": (lambda w: [w.block(), {"type": "text", "text": None}], False),
    "block that is null": (lambda w: [w.block(), None], False),
    "nested blocks": (lambda w: [[w.block()]], False),
    "image block": (lambda w: [w.block(), {"type": "image_url", "image_url": {"url": "https://x/y.png"}}], False),
    "mapping": (lambda w: {"temperature": w.text(), "unit": w.mark()}, False),
    "one block, no list": (lambda w: w.block(), False),
    "list of mappings": (lambda w: [{"temperature": w.text()}, {"output": w.text()}], False),
    "number": (lambda w: 48213.75, False),
    "bytes": (lambda w: w.text().encode(), False),
    "empty text": (lambda w: "", False),
    "white space": (lambda w: " \n ", False),
    "no blocks": (lambda w: [], False),
    "empty block": (lambda w: [{"type": "text", "text": ""}], False),
    "null": (lambda w: None, False),
}
_ANSWER_AS = {"mapping", "list of mappings"}
"""Contents that are honest as the answer of a tool, though most templates cannot show them."""


def _places(w: Words, content: Any) -> dict[str, list[Message]]:
    """Return conversations that have a content in each role and place, by name."""
    calling = w.calling({"city": w.text()})
    (call,) = calling["tool_calls"]
    return {
        "user": [{"role": "user", "content": content}],
        "user, later": [w.user(), w.said(), {"role": "user", "content": content}],
        "user, twice": [w.user(), {"role": "user", "content": content}],
        "system": [{"role": "system", "content": content}, w.user()],
        "system, second": [{"role": "system", "content": w.text()}, {"role": "system", "content": content}, w.user()],
        "system, later": [w.user(), w.said(), {"role": "system", "content": content}, w.user()],
        "system, last": [w.user(), w.said(), {"role": "system", "content": content}],
        "developer": [{"role": "developer", "content": content}, w.user()],
        "developer, second": [
            {"role": "system", "content": w.text()},
            {"role": "developer", "content": content},
            w.user(),
        ],
        "developer, later": [w.user(), w.said(), {"role": "developer", "content": content}, w.user()],
        "assistant": [w.user(), {"role": "assistant", "content": content}, w.user()],
        "assistant, twice": [w.user(), w.said(), {"role": "assistant", "content": content}, w.user()],
        "assistant, first": [{"role": "assistant", "content": content}, w.user()],
        "assistant, with a call": [w.user(), {**calling, "content": content}, w.answer(call=call), w.user()],
        "tool": [w.user(), calling, w.answer(content, call)],
        "tool, then user": [w.user(), calling, w.answer(content, call), w.said(), w.user()],
    }


def _contents(w: Words) -> Iterator[Case]:
    for form, (make, honest) in _CONTENTS.items():
        for place in _places(Words(), "x"):
            messages = _places(w, make(w))[place]
            # An assistant that calls often writes nothing else.
            fair = honest or (place == "assistant, with a call" and form in ("empty text", "null"))
            yield Case(place, form, messages, fair)


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema(w: Words, rest: str = "") -> dict[str, Any]:
    city = {"type": "string", "description": w.text(rest)}
    return _function(f"tool_{w.mark()}", w.text(rest), **{f"city_{w.mark()}": city})


def _ends(w: Words) -> Iterator[Case]:
    """Yield rows that end in the assistant's message, and rows with an interaction."""
    ends: dict[str, list[Message]] = {
        "an answer": [w.user(), w.said()],
        "an answer as block": [w.user(), {"role": "assistant", "content": [w.block()]}],
        "a greeting": [w.said()],
        "a greeting behind a system": [{"role": "system", "content": w.text()}, w.said()],
        "a call": [w.user(), w.calling({"city": w.text()})],
        "an empty answer": [w.user(), {"role": "assistant", "content": ""}],
        "a beginning": [w.user(), {"role": "assistant", "content": f"{w.text()} <think>"}],
        "a history": [w.user(), w.said(), w.user(), w.said()],
        "an answer behind a tool's": [*dialogue(w, {"city": w.text()})[:3], w.said()],
    }
    for form, messages in ends.items():
        yield Case("ends in the assistant", form, messages, False, refused=True)
        honest = form not in ("a call", "an empty answer", "a beginning")
        for who, replies in (("start", False), ("reply", True)):
            opening = w.text(RICH)
            yield Case(f"ends, then {who}", form, messages, honest, interaction=True, opening=opening, replies=replies)
    starts: dict[str, list[Message]] = {
        "user": [w.user()],
        "system": [{"role": "system", "content": w.text()}],
        "developer": [{"role": "developer", "content": [w.block()]}],
        "history": [w.user(), w.said()],
        "greeting as blocks": [{"role": "assistant", "content": [w.block(), w.block()]}],
        "call": dialogue(w, json.dumps({"city": w.text()})),
        "nothing": [],
    }
    for form, messages in starts.items():
        honest = form != "nothing"
        yield Case("interaction", form, messages, honest, interaction=True, opening=w.text())
        yield Case(
            "interaction with tools", form, messages, honest, interaction=True, opening=w.text(), schemas=(_schema(w),)
        )
    yield Case("interaction", "silent", [w.user()], interaction=True)


def _tools(w: Words) -> Iterator[Case]:
    bare = {
        "type": "function",
        "function": {"name": f"tool_{w.mark()}", "parameters": {"type": "object", "properties": {}}},
    }
    kinds: dict[str, tuple[dict[str, Any], ...]] = {
        "one": (_schema(w),),
        "three": tuple(_schema(w) for _ in range(3)),
        "rich": (_schema(w, RICH),),
        "no description": (bare,),
        "long": (_schema(w, " ".join(w.mark() for _ in range(200))),),
    }
    conversations: dict[str, Callable[[], list[Message]]] = {
        "user": lambda: [w.user()],
        "block": lambda: [{"role": "user", "content": [w.block()]}],
        "system": lambda: [{"role": "system", "content": w.text()}, w.user()],
        "system as block": lambda: [{"role": "system", "content": [w.block()]}, w.user()],
        "developer": lambda: [{"role": "developer", "content": w.text()}, w.user()],
        "two systems": lambda: [*({"role": "system", "content": w.text()} for _ in range(2)), w.user()],
        "greeting": lambda: [w.said(), w.user()],
        "greeting behind a system": lambda: [{"role": "system", "content": w.text()}, w.said(), w.user()],
        "call": lambda: dialogue(w, {"city": w.text()}),
        "call as text": lambda: dialogue(w, json.dumps({"city": w.text()})),
        "answer last": lambda: dialogue(w, {"city": w.text()})[:3],
        "later system": lambda: [w.user(), w.said(), {"role": "system", "content": w.text()}, w.user()],
    }
    for kind, schemas in kinds.items():
        for form, make in conversations.items():
            yield Case(f"tools, {kind}", form, make(), schemas=schemas)


def written_cases() -> list[Case]:
    """Return all cases as their authors wrote them, the same each time."""
    w = Words()
    makers = (_contents, call_cases, answer_cases, history_cases, reasoning_cases, key_cases, _ends, _tools)
    return [replace(case, messages=copy.deepcopy(case.messages)) for make in makers for case in make(w)]


def row_marks(value: Any) -> Sequence[str]:
    """Return all words of a row that occur once."""
    return MARK.findall(repr(value))
