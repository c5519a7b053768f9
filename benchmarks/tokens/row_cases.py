"""The rows that `benchmarks.rows` tries: roles × forms, calls, answers, histories, greetings, odd messages, and storage.

Each text has words that occur nowhere else. A case is honest where an author may well write such a row, by hand or by a
library that stores it; a prompt that could show it must then show it.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
_RICH = ' "quoted" and \'single\', <b>a & b</b>, C:\\dir, {"k": [1, null]},\n\tline two:  Größe, 北京, नमस्ते, 🙂'


@dataclass(frozen=True)
class Case:
    """A data row, as its author wrote it."""

    role: str
    """What is tried: a role in its place, calls, answers, …"""
    form: str
    messages: list[Any]
    honest: bool = True
    """Whether an author may write such a row in good faith."""
    refused: bool = False
    """Whether the row has to be refused, whatever its prompt shows."""
    schemas: tuple[dict[str, Any], ...] = ()
    interaction: bool = False
    opening: str | None = None
    """What the row's interaction says first; None: nothing."""
    stored: Any = None
    """The row's messages as a file of rows gives them back; None: as they were written."""
    columns: bool = False
    """Whether they have been in columns, in which each row has the keys of all rows."""

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"{self.role}: {self.form}"


class _Words:
    """A source of words that occur once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def mark(self) -> str:
        return f"zq{next(self._numbers)}x"

    def text(self, rest: str = "") -> str:
        return f"Say {self.mark()}{rest} and {self.mark()}."

    def call(self, arguments: Any, number: int = 0, name: str | None = None) -> dict[str, Any]:
        function = {"name": name or f"tool_{self.mark()}", "arguments": arguments}
        return {"id": f"call0000{number}", "type": "function", "function": function}

    def calling(self, *arguments: Any, content: Any = "") -> Message:
        calls = [self.call(each, number) for number, each in enumerate(arguments)]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def answer(self, content: Any = None, call: Any = None) -> Message:
        text = self.text() if content is None else content
        given = {"tool_call_id": call["id"], "name": call["function"]["name"]} if call else {}
        return {"role": "tool", "content": text, **given}

    def user(self) -> Message:
        return {"role": "user", "content": self.text()}

    def said(self) -> Message:
        return {"role": "assistant", "content": self.text()}

    def block(self, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": self.text(), **more}


# Name → a function that makes the content of a message, and whether it is honest.
_CONTENTS: dict[str, tuple[Callable[[_Words], Any], bool]] = {
    "text": (lambda w: w.text(), True),
    "rich text": (lambda w: w.text(_RICH), True),
    "text with white space around it": (lambda w: f"\n  {w.text()}\n\n", True),
    "text with a control token": (lambda w: f"{w.text()} <|im_end|> </s> {w.text()}", True),
    "JSON text": (lambda w: json.dumps({"a": w.text(), "b": None}), True),
    "very long text": (lambda w: " ".join(w.mark() for _ in range(700)), True),
    "block": (lambda w: [w.block()], True),
    "rich block": (lambda w: [{"type": "text", "text": w.text(_RICH)}], True),
    "two blocks": (lambda w: [w.block(), w.block()], True),
    "five blocks": (lambda w: [w.block() for _ in range(5)], True),
    "block and empty block": (lambda w: [{"type": "text", "text": ""}, w.block(), {"type": "text", "text": ""}], True),
    "block with white space": (lambda w: [{"type": "text", "text": f" \n{w.text()}\n "}, w.block()], True),
    "blocks with nulls": (lambda w: [w.block(image_url=None, cache_control=None), w.block(image=None, video=None)], True),
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
    "block with a value for text": (lambda w: [{"type": "text", "text": {"value": w.text(), "annotations": []}}], False),
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


def _places(w: _Words, content: Any) -> dict[str, list[Message]]:
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
        "developer, second": [{"role": "system", "content": w.text()}, {"role": "developer", "content": content}, w.user()],
        "developer, later": [w.user(), w.said(), {"role": "developer", "content": content}, w.user()],
        "assistant": [w.user(), {"role": "assistant", "content": content}, w.user()],
        "assistant, twice": [w.user(), w.said(), {"role": "assistant", "content": content}, w.user()],
        "assistant, first": [{"role": "assistant", "content": content}, w.user()],
        "assistant, with a call": [w.user(), {**calling, "content": content}, w.answer(call=call), w.user()],
        "tool": [w.user(), calling, w.answer(content, call)],
        "tool, then user": [w.user(), calling, w.answer(content, call), w.said(), w.user()],
    }


def _contents(w: _Words) -> Iterator[Case]:
    for form, (make, honest) in _CONTENTS.items():
        for place in _places(_Words(), "x"):
            messages = _places(w, make(w))[place]
            # An assistant that calls says often nothing else.
            fair = honest or (place == "assistant, with a call" and form in ("empty text", "null"))
            yield Case(place, form, messages, fair)


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema(w: _Words, rest: str = "") -> dict[str, Any]:
    city = {"type": "string", "description": w.text(rest)}
    return _function(f"tool_{w.mark()}", w.text(rest), **{f"city_{w.mark()}": city})


# Name → a function that makes the arguments of a call, and whether they are honest.
_ARGUMENTS: dict[str, tuple[Callable[[_Words], Any], bool]] = {
    "one": (lambda w: {"city": w.text()}, True),
    "several": (lambda w: {"city": w.text(), "country": w.text(), "zip": w.mark()}, True),
    "rich": (lambda w: {"query": w.text(_RICH)}, True),
    "numbers": (lambda w: {"count": 48213, "share": 0.4375, "minus": -7, "yes": True, "no": False}, True),
    "lists": (lambda w: {"ids": [1, 2, 3], "names": [w.text(), w.text()]}, True),
    "nested": (lambda w: {"opts": {"deep": {w.mark(): w.text(), "on": True}, "n": 48214}, "rows": [{"a": w.text()}]}, True),
    "empty": (lambda w: {}, True),
    "empty inside": (lambda w: {"city": w.text(), "tags": [], "opts": {}, "note": ""}, True),
    "null inside": (lambda w: {"city": w.text(), "note": None, "opts": {"a": None, "b": w.mark()}}, True),
    "null in a list": (lambda w: {"cells": [1, None, 3], "city": w.text()}, True),
    "unicode": (lambda w: {"query": w.text(" 北京 Größe 🙂 \u2028"), "größe": w.mark()}, True),
    "HTML": (lambda w: {"html": f"<a href='x'>{w.mark()} & \u003cb\u003e</a>"}, True),
    "code": (lambda w: {"code": f"def f(x):\n    return x['{w.mark()}'] + \"\\n\"\n"}, True),
    "text that is JSON": (lambda w: {"body": json.dumps({"a": w.mark(), "b": [None]})}, True),
    "text that is a number": (lambda w: {"zip": "01234", "flag": "true", "city": w.text()}, True),
    "names of methods": (lambda w: {"items": w.text(), "keys": w.mark(), "name": w.text(), "arguments": w.text()}, True),
    "large numbers": (lambda w: {"big": 10**20, "tiny": 1e-7, "huge": 1e300, "city": w.text()}, True),
    "control token": (lambda w: {"query": f"{w.text()} <|im_end|> {w.text()}"}, True),
    "reserved names": (lambda w: {"type": w.text(), "id": w.text(), "function": w.text()}, True),
    "white space": (lambda w: {"code": f"  {w.text()}\n"}, True),
}


def _dialogue(w: _Words, arguments: Any) -> list[Message]:
    calling = w.calling(arguments)
    return [w.user(), calling, w.answer(call=calling["tool_calls"][0]), w.user()]


def _calls(w: _Words) -> Iterator[Case]:
    for form, (make, honest) in _ARGUMENTS.items():
        yield Case("arguments, mapping", form, _dialogue(w, make(w)), honest)
        yield Case("arguments, text", form, _dialogue(w, json.dumps(make(w), ensure_ascii=False)), honest)
        yield Case("arguments, escaped text", form, _dialogue(w, json.dumps(make(w), indent=1)), honest)
    odd: dict[str, tuple[Any, bool]] = {
        "text, empty": ("", True),
        "text, white space": (" ", False),
        "null": (None, True),
        "text null": ("null", False),
        "broken text": (f'{{"city": "{w.mark()}"', False),
        "plain text": (w.text(), False),
        "text of a list": (json.dumps([w.text()]), False),
        "text of a text": (json.dumps(w.text()), False),
        "text of a text of a mapping": (json.dumps(json.dumps({"city": w.text()})), False),
        "text with NaN": (f'{{"city": "{w.mark()}", "x": NaN}}', False),
        "list": ([{"city": w.text()}], False),
        "number": (48215, False),
    }
    for form, (value, honest) in odd.items():
        yield Case("arguments, odd", form, _dialogue(w, value), honest)
    dialogue = _dialogue(w, {"city": w.text()})
    del dialogue[1]["tool_calls"][0]["function"]["arguments"]
    yield Case("arguments, odd", "missing", dialogue)
    yield from _shapes(w)


def _shapes(w: _Words) -> Iterator[Case]:
    def shaped(form: str, change: Callable[[Message], None], honest: bool, arguments: Any = None) -> Case:
        messages = _dialogue(w, {"city": w.text()} if arguments is None else arguments)
        change(messages[1])
        return Case("calls", form, messages, honest)

    def call(message: Message) -> dict[str, Any]:
        made: dict[str, Any] = message["tool_calls"][0]
        return made

    yield shaped("with text", lambda m: m.update(content=w.text()), True)
    yield shaped("with blocks", lambda m: m.update(content=[w.block(), w.block()]), True)
    yield shaped("content null", lambda m: m.update(content=None), True)
    yield shaped("content missing", lambda m: m.pop("content"), True)
    yield shaped("no blocks", lambda m: m.update(content=[]), False)
    yield shaped("no id", lambda m: call(m).pop("id"), True)
    yield shaped("id null", lambda m: call(m).update(id=None), True)
    yield shaped("no type", lambda m: call(m).pop("type"), True)
    yield shaped("index", lambda m: call(m).update(index=0), True)
    yield shaped("function_call null", lambda m: m.update(function_call=None, refusal=None, audio=None), True)
    yield shaped("flat", lambda m: m.update(tool_calls=[{"id": "c", **call(m)["function"]}]), False)
    yield shaped("other type", lambda m: call(m).update(type="custom"), False)
    yield shaped("name null", lambda m: call(m)["function"].update(name=None), False)
    yield shaped("name empty", lambda m: call(m)["function"].update(name=""), False)
    yield shaped("name missing", lambda m: call(m)["function"].pop("name"), False)
    yield shaped("name no text", lambda m: call(m)["function"].update(name=[w.mark()]), False)
    yield shaped("as JSON text", lambda m: m.update(tool_calls=json.dumps(m["tool_calls"])), False)
    yield shaped("as mapping", lambda m: m.update(tool_calls=m["tool_calls"][0]), False)
    yield shaped("call as text", lambda m: m.update(tool_calls=[json.dumps(m["tool_calls"][0])]), False)
    yield shaped("call null", lambda m: m.update(tool_calls=[m["tool_calls"][0], None]), False)
    yield shaped("function_call", lambda m: m.update(function_call=m.pop("tool_calls")[0]["function"]), False)
    yield shaped("function_call too", lambda m: m.update(function_call=w.call("{}")["function"]), False)
    for form, value in (("none", []), ("null", None)):
        said = {**w.said(), "tool_calls": value}
        yield Case("calls, empty", form, [w.user(), said, w.user()])
        yield Case("calls, empty", f"{form}, with blocks", [w.user(), {**said, "content": [w.block()]}, w.user()])
        everywhere = [{**m, "tool_calls": value} for m in [{"role": "system", "content": w.text()}, w.user(), w.said(), w.user()]]
        yield Case("calls, empty", f"{form}, in each message", everywhere)
    yield Case("calls", "of a user", [{**w.user(), "tool_calls": [w.call({"a": w.text()})]}], False)
    yield Case("calls", "of a tool's answer", [*_dialogue(w, {"a": w.text()})[:2], {**w.answer(), "tool_calls": [w.call({})]}], False)


def _answers(w: _Words) -> Iterator[Case]:
    def answered(form: str, honest: bool, change: Callable[[Message], object]) -> Case:
        messages = _dialogue(w, {"city": w.text()})
        change(messages[2])
        return Case("answers", form, messages, honest)

    yield answered("no id", True, lambda m: m.pop("tool_call_id"))
    yield answered("no name", True, lambda m: m.pop("name"))
    yield answered("no id and no name", True, lambda m: (m.pop("name"), m.pop("tool_call_id")))
    yield answered("id null, name null", True, lambda m: m.update(name=None, tool_call_id=None))
    yield answered("unknown id", False, lambda m: m.update(tool_call_id="other"))
    yield answered("role function", False, lambda m: m.update(role="function"))
    yield answered("role ipython", False, lambda m: m.update(role="ipython"))
    yield answered("content missing", False, lambda m: m.pop("content"))
    for count in (2, 3):
        calling = w.calling(*({"city": w.text(), "n": 48300 + n} for n in range(count)))
        answers = [w.answer(call=call) for call in calling["tool_calls"]]
        yield Case("answers", f"of {count} calls", [w.user(), calling, *answers, w.user()])
        yield Case("answers", f"of {count} calls, last", [w.user(), calling, *answers])
        yield Case("answers", f"of {count} calls, in another order", [w.user(), calling, *answers[::-1], w.user()], False)
        blocks = [{**answer, "content": [w.block()]} for answer in answers]
        yield Case("answers", f"of {count} calls, as blocks", [w.user(), calling, *blocks, w.user()])
        yield Case("answers", f"of {count} calls, one missing", [w.user(), calling, *answers[1:], w.user()], False)
    same = w.calling({"city": w.text()}, {"city": w.text()})
    answers = [w.answer(call=call) for call in same["tool_calls"]]
    answers[1]["content"] = answers[0]["content"]
    yield Case("answers", "alike", [w.user(), same, *answers, w.user()])
    yield Case("answers", "without a call", [w.user(), w.answer(), w.user()], False)
    yield Case("answers", "without a call, last", [w.user(), w.answer()], False)
    yield Case("answers", "first", [w.answer(), w.user()], False)
    yield Case("answers", "behind another turn", [*_dialogue(w, {"a": w.text()})[:2], w.user(), w.answer()], False)
    yield Case("answers", "none", [w.user(), w.calling({"city": w.text()}), w.user()], False)


def _histories(w: _Words) -> Iterator[Case]:
    system = {"role": "system", "content": w.text()}
    for turns in (2, 3):
        messages: list[Message] = [system]
        for turn in range(turns):
            calling = w.calling({"city": w.text(), "turn": 48400 + turn}, content="" if turn % 2 else None)
            messages += [w.user(), calling, w.answer(call=calling["tool_calls"][0]), w.said()]
        yield Case("histories", f"{turns} turns with a call", [*messages, w.user()])
    steps: list[Message] = [w.user()]
    for content in (None, w.text(), ""):
        calling = w.calling({"step": w.text()}, content=content)
        steps += [calling, w.answer(call=calling["tool_calls"][0])]
    yield Case("histories", "three steps of one turn", steps)
    silent = copy.deepcopy(steps)
    for message in silent:
        message["content"] = message["content"] if message["role"] != "assistant" else ""
    yield Case("histories", "three steps without text", [*silent, w.said(), w.user()])
    yield Case("histories", "long", [m for _ in range(12) for m in (w.user(), w.said())] + [w.user()])
    yield Case("histories", "five users in a row", [w.user() for _ in range(5)])
    yield Case("histories", "system between users", [w.user(), {"role": "system", "content": w.text()}, w.user()])
    yield Case("histories", "developer at the end", [w.user(), {"role": "developer", "content": w.text()}])
    twice = w.text()
    yield Case("histories", "one text twice", [{"role": "user", "content": twice}, w.said(), {"role": "user", "content": twice}])
    yield Case("histories", "one system text twice", [*({"role": "system", "content": twice} for _ in range(2)), w.user()])
    yield Case("histories", "system text as the user's", [{"role": "system", "content": twice}, {"role": "user", "content": twice}])
    later = [{"role": "system", "content": twice}, w.user(), w.said(), {"role": "system", "content": twice}, w.user()]
    yield Case("histories", "system text again later", later)
    for form, roles in {"two": "ss", "three": "sss", "developer first": "ds", "mixed": "sdsd"}.items():
        leading = [{"role": "system" if role == "s" else "developer", "content": w.text()} for role in roles]
        yield Case("histories", f"systems, {form}", [*leading, w.user()])
        blocks = [{**message, "content": [w.block(), w.block()]} for message in leading]
        yield Case("histories", f"systems, {form}, as blocks", [*blocks, w.user()])
    mixed = [{"role": "system", "content": [w.block()]}, w.user(), {**w.said(), "content": [w.block()]}, w.user()]
    yield Case("histories", "blocks and texts", mixed)
    yield Case("histories", "system alone", [system], False)
    yield Case("histories", "developer alone", [{"role": "developer", "content": w.text()}], False)


def _reasoning(w: _Words) -> Iterator[Case]:
    for key in ("reasoning_content", "reasoning", "thinking"):
        yield Case("reasoning", key, [w.user(), {**w.said(), key: w.text()}, w.user()])
        messages = _dialogue(w, {"city": w.text()})
        messages[1][key] = w.text()
        yield Case("reasoning", f"{key} with a call", messages)
        yield Case("reasoning", f"{key} null", [w.user(), {**w.said(), key: None}, {**w.user(), key: None}])
    thought = f"<think>\n{w.text()}\n</think>\n\n"
    yield Case("reasoning", "in the text", [w.user(), {"role": "assistant", "content": thought + w.text()}, w.user()])
    before = f"{w.text()} {thought}{w.text()}"
    yield Case("reasoning", "behind a text", [w.user(), {"role": "assistant", "content": before}, w.user()], False)
    quoted = f"{w.text()} is closed by </think>, {w.text()}"
    yield Case("reasoning", "an end alone in the text", [w.user(), {"role": "assistant", "content": quoted}, w.user()], False)
    yield Case("reasoning", "an end in the user's text", [{"role": "user", "content": quoted}])
    yield Case("reasoning", "a beginning in the user's text", [{"role": "user", "content": f"<think>{w.text()}"}, w.said(), w.user()])
    calling = w.calling({"city": w.text()}, content=thought + w.text())
    yield Case("reasoning", "in the text, with a call", [w.user(), calling, w.answer(call=calling["tool_calls"][0])])
    blocks = [{"type": "thinking", "thinking": w.text()}, w.block()]
    yield Case("reasoning", "as a block", [w.user(), {"role": "assistant", "content": blocks}, w.user()], False)


def _keys(w: _Words) -> Iterator[Case]:
    yield Case("keys", "name of a user", [{**w.user(), "name": "Ada"}])
    yield Case("keys", "name of an assistant", [w.user(), {**w.said(), "name": "Bo"}, w.user()])
    nulls = dict.fromkeys(["name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "reasoning_content"])
    yield Case("keys", "nulls of OpenAI", [{**nulls, **message} for message in (w.user(), w.said(), w.user())])
    yield Case("keys", "nulls in a call", [{**nulls, **message} for message in _dialogue(w, {"city": w.text()})])
    yield Case("keys", "weight, id, metadata", [{**w.user(), "weight": 1, "id": "m1", "metadata": {"a": "b"}}, w.said(), w.user()], False)
    yield Case("keys", "refusal", [w.user(), {"role": "assistant", "content": None, "refusal": w.text()}, w.user()], False)
    yield Case("keys", "refusal beside text", [w.user(), {**w.said(), "refusal": w.text()}, w.user()], False)
    for key in ("text", "value", "message", "parts", "Content"):
        yield Case("keys", f"{key} for content", [{"role": "user", key: w.text()}], False)
        yield Case("keys", f"{key} for content, earlier", [{"role": "system", key: w.text()}, w.user()], False)
    for role in ("User", "SYSTEM", "human", "gpt", "model", "bot", "function", "ipython", "environment", "", None, 3):
        yield Case("role", repr(role), [{"role": role, "content": w.text()}, w.user()], False, refused=role in ("", None, 3))
    yield Case("role", "missing", [{"content": w.text()}, w.user()], False, refused=True)
    yield Case("role", "ShareGPT", [{"from": "human", "value": w.text()}], False, refused=True)
    for form, rows in {"none": [], "text": w.text(), "null": None, "texts": [w.text()], "one message": w.user()}.items():
        yield Case("messages", form, rows, False, refused=True)  # type: ignore[arg-type]  # what rows must not have
    yield Case("messages", "pairs", [["user", w.text()]], False, refused=True)
    yield Case("messages", "JSON text", json.dumps([w.user()]), False, refused=True)  # type: ignore[arg-type]  # likewise


def _ends(w: _Words) -> Iterator[Case]:
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
        "an answer behind a tool's": [*_dialogue(w, {"city": w.text()})[:3], w.said()],
    }
    for form, messages in ends.items():
        yield Case("ends in the assistant", form, messages, False, refused=True)
        yield Case("ends, silent interaction", form, messages, False, refused=True, interaction=True)
        honest = form not in ("a call", "an empty answer", "a beginning")
        for opening in (w.text(), w.text(_RICH)):
            yield Case("ends, then interaction", form, messages, honest, interaction=True, opening=opening)
    starts: dict[str, list[Message]] = {
        "user": [w.user()],
        "system": [{"role": "system", "content": w.text()}],
        "developer": [{"role": "developer", "content": [w.block()]}],
        "history": [w.user(), w.said()],
        "greeting as blocks": [{"role": "assistant", "content": [w.block(), w.block()]}],
        "call": _dialogue(w, json.dumps({"city": w.text()})),
        "nothing": [],
    }
    for form, messages in starts.items():
        honest = form != "nothing"
        yield Case("interaction", form, messages, honest, interaction=True, opening=w.text())
        yield Case("interaction with tools", form, messages, honest, interaction=True, opening=w.text(), schemas=(_schema(w),))
    yield Case("interaction", "silent", [w.user()], interaction=True)


def _tools(w: _Words) -> Iterator[Case]:
    bare = {"type": "function", "function": {"name": f"tool_{w.mark()}", "parameters": {"type": "object", "properties": {}}}}
    kinds: dict[str, tuple[dict[str, Any], ...]] = {
        "one": (_schema(w),),
        "three": tuple(_schema(w) for _ in range(3)),
        "rich": (_schema(w, _RICH),),
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
        "call": lambda: _dialogue(w, {"city": w.text()}),
        "call as text": lambda: _dialogue(w, json.dumps({"city": w.text()})),
        "answer last": lambda: _dialogue(w, {"city": w.text()})[:3],
        "later system": lambda: [w.user(), w.said(), {"role": "system", "content": w.text()}, w.user()],
    }
    for kind, schemas in kinds.items():
        for form, make in conversations.items():
            yield Case(f"tools, {kind}", form, make(), schemas=schemas)


def written_cases() -> list[Case]:
    """Return all cases as their authors wrote them, the same each time."""
    w = _Words()
    makers = (_contents, _calls, _answers, _histories, _reasoning, _keys, _ends, _tools)
    return [replace(case, messages=copy.deepcopy(case.messages)) for make in makers for case in make(w)]


def row_marks(value: Any) -> Sequence[str]:
    """Return all words of a row that occur once."""
    from benchmarks.row_oracle import MARK

    return MARK.findall(repr(value))
