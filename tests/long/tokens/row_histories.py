"""The rows of `benchmarks.rows` with calls, answers of tools, several turns, reasoning, and keys that few know."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np

from tests.long.tokens.row_parts import RICH, Case, Message, Words, dialogue

# Name → a function that makes the arguments of a call, and whether they are honest.
_ARGUMENTS: dict[str, tuple[Callable[[Words], Any], bool]] = {
    "one": (lambda w: {"city": w.text()}, True),
    "several": (lambda w: {"city": w.text(), "country": w.text(), "zip": w.mark()}, True),
    "rich": (lambda w: {"query": w.text(RICH)}, True),
    "numbers": (lambda w: {"count": 48213, "share": 0.4375, "minus": -7, "yes": True, "no": False}, True),
    "lists": (lambda w: {"ids": [1, 2, 3], "names": [w.text(), w.text()]}, True),
    "nested": (
        lambda w: {"opts": {"deep": {w.mark(): w.text(), "on": True}, "n": 48214}, "rows": [{"a": w.text()}]},
        True,
    ),
    "empty": (lambda w: {}, True),
    "empty inside": (lambda w: {"city": w.text(), "tags": [], "opts": {}, "note": ""}, True),
    "null inside": (lambda w: {"city": w.text(), "note": None, "opts": {"a": None, "b": w.mark()}}, True),
    "null in a list": (lambda w: {"cells": [1, None, 3], "city": w.text()}, True),
    "unicode": (lambda w: {"query": w.text(" 北京 Größe 🙂 \u2028"), "größe": w.mark()}, True),
    "HTML": (lambda w: {"html": f"<a href='x'>{w.mark()} & \u003cb\u003e</a>"}, True),
    "code": (lambda w: {"code": f"def f(x):\n    return x['{w.mark()}'] + \"\\n\"\n"}, True),
    "text that is JSON": (lambda w: {"body": json.dumps({"a": w.mark(), "b": [None]})}, True),
    "text that is a number": (lambda w: {"zip": "01234", "flag": "true", "city": w.text()}, True),
    "names of methods": (
        lambda w: {"items": w.text(), "keys": w.mark(), "name": w.text(), "arguments": w.text()},
        True,
    ),
    "large numbers": (lambda w: {"big": 10**20, "tiny": 1e-7, "huge": 1e300, "city": w.text()}, True),
    "control token": (lambda w: {"query": f"{w.text()} <|im_end|> {w.text()}"}, True),
    "reserved names": (lambda w: {"type": w.text(), "id": w.text(), "function": w.text()}, True),
    "white space": (lambda w: {"code": f"  {w.text()}\n"}, True),
    "text of Windows": (lambda w: {"code": f"a = 1\r\nb = {w.mark()}\r\n\tc"}, True),
    "deep": (lambda w: {"a": {"b": {"c": {"d": [[{"e": w.text()}], [w.mark()]]}}}}, True),
    "many": (lambda w: {f"key_{number}": w.mark() for number in range(40)}, True),
}


def call_cases(w: Words) -> Iterator[Case]:
    """Yield rows with arguments in each form, and calls in each shape."""
    for form, (make, honest) in _ARGUMENTS.items():
        yield Case("arguments, mapping", form, dialogue(w, make(w)), honest)
        yield Case("arguments, text", form, dialogue(w, json.dumps(make(w), ensure_ascii=False)), honest)
        yield Case("arguments, escaped text", form, dialogue(w, json.dumps(make(w), indent=1)), honest)
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
        "pairs": ([("city", w.text()), ("country", w.text())], False),
        "array of numpy": ({"ids": np.array([1, 2, 3]), "n": np.int64(48216), "x": np.float32(0.5)}, True),
        "date": ({"day": datetime.date(2031, 5, 17), "city": w.text()}, False),
        "decimal": ({"price": Decimal("48217.25"), "city": w.text()}, False),
        "bytes": ({"data": w.text().encode()}, False),
        "tuple": ({"ids": (48218, 48219)}, False),
        "a number for a name": ({48220: w.text()}, False),
        "NaN": ({"x": float("nan"), "city": w.text()}, False),
        "number": (48215, False),
    }
    for form, (value, honest) in odd.items():
        yield Case("arguments, odd", form, dialogue(w, value), honest)
    without = dialogue(w, {"city": w.text()})
    del without[1]["tool_calls"][0]["function"]["arguments"]
    yield Case("arguments, odd", "missing", without)
    yield from _shapes(w)


def _shapes(w: Words) -> Iterator[Case]:
    def shaped(form: str, change: Callable[[Message], None], honest: bool, arguments: Any = None) -> Case:
        messages = dialogue(w, {"city": w.text()} if arguments is None else arguments)
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
        everywhere = [
            {**m, "tool_calls": value} for m in [{"role": "system", "content": w.text()}, w.user(), w.said(), w.user()]
        ]
        yield Case("calls, empty", f"{form}, in each message", everywhere)
    yield Case("calls", "of a user", [{**w.user(), "tool_calls": [w.call({"a": w.text()})]}], False)
    yield Case(
        "calls",
        "of a tool's answer",
        [*dialogue(w, {"a": w.text()})[:2], {**w.answer(), "tool_calls": [w.call({})]}],
        False,
    )


def answer_cases(w: Words) -> Iterator[Case]:
    """Yield rows with answers of tools."""

    def answered(form: str, honest: bool, change: Callable[[Message], object]) -> Case:
        messages = dialogue(w, {"city": w.text()})
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
        yield Case(
            "answers", f"of {count} calls, in another order", [w.user(), calling, *answers[::-1], w.user()], False
        )
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
    yield Case("answers", "behind another turn", [*dialogue(w, {"a": w.text()})[:2], w.user(), w.answer()], False)
    yield Case("answers", "none", [w.user(), w.calling({"city": w.text()}), w.user()], False)


def history_cases(w: Words) -> Iterator[Case]:
    """Yield rows with several turns, and with several system messages."""
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
    yield Case("histories", "very long", [m for _ in range(150) for m in (w.user(), w.said())] + [w.user()])
    yield Case("histories", "five users in a row", [w.user() for _ in range(5)])
    yield Case("histories", "system between users", [w.user(), {"role": "system", "content": w.text()}, w.user()])
    yield Case("histories", "developer at the end", [w.user(), {"role": "developer", "content": w.text()}])
    twice = w.text()
    yield Case(
        "histories",
        "one text twice",
        [{"role": "user", "content": twice}, w.said(), {"role": "user", "content": twice}],
    )
    yield Case(
        "histories", "one system text twice", [*({"role": "system", "content": twice} for _ in range(2)), w.user()]
    )
    yield Case(
        "histories",
        "system text as the user's",
        [{"role": "system", "content": twice}, {"role": "user", "content": twice}],
    )
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


def reasoning_cases(w: Words) -> Iterator[Case]:
    """Yield rows with reasoning, which is hidden, beside text that is not."""
    for key in ("reasoning_content", "reasoning", "thinking"):
        yield Case("reasoning", key, [w.user(), {**w.said(), key: w.text()}, w.user()])
        messages = dialogue(w, {"city": w.text()})
        messages[1][key] = w.text()
        yield Case("reasoning", f"{key} with a call", messages)
        yield Case("reasoning", f"{key} null", [w.user(), {**w.said(), key: None}, {**w.user(), key: None}])
    thought = f"<think>\n{w.text()}\n</think>\n\n"
    yield Case("reasoning", "in the text", [w.user(), {"role": "assistant", "content": thought + w.text()}, w.user()])
    before = f"{w.text()} {thought}{w.text()}"
    yield Case("reasoning", "behind a text", [w.user(), {"role": "assistant", "content": before}, w.user()], False)
    quoted = f"{w.text()} is closed by </think>, {w.text()}"
    yield Case(
        "reasoning", "an end alone in the text", [w.user(), {"role": "assistant", "content": quoted}, w.user()], False
    )
    yield Case("reasoning", "an end in the user's text", [{"role": "user", "content": quoted}])
    yield Case(
        "reasoning",
        "a beginning in the user's text",
        [{"role": "user", "content": f"<think>{w.text()}"}, w.said(), w.user()],
    )
    calling = w.calling({"city": w.text()}, content=thought + w.text())
    yield Case("reasoning", "in the text, with a call", [w.user(), calling, w.answer(call=calling["tool_calls"][0])])
    blocks = [{"type": "thinking", "thinking": w.text()}, w.block()]
    yield Case("reasoning", "as a block", [w.user(), {"role": "assistant", "content": blocks}, w.user()], False)


def key_cases(w: Words) -> Iterator[Case]:
    """Yield rows with other keys, other roles, and values that are not lists of messages."""
    yield Case("keys", "name of a user", [{**w.user(), "name": "Ada"}], False)
    yield Case("keys", "name of an assistant", [w.user(), {**w.said(), "name": "Bo"}, w.user()], False)
    nulls = dict.fromkeys(
        ["name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "reasoning_content"]
    )
    yield Case("keys", "nulls of OpenAI", [{**nulls, **message} for message in (w.user(), w.said(), w.user())])
    yield Case("keys", "nulls in a call", [{**nulls, **message} for message in dialogue(w, {"city": w.text()})])
    yield Case(
        "keys",
        "weight, id, metadata",
        [{**w.user(), "weight": 1, "id": "m1", "metadata": {"a": "b"}}, w.said(), w.user()],
        False,
    )
    yield Case(
        "keys", "refusal", [w.user(), {"role": "assistant", "content": None, "refusal": w.text()}, w.user()], False
    )
    yield Case("keys", "refusal beside text", [w.user(), {**w.said(), "refusal": w.text()}, w.user()], False)
    for key in ("text", "value", "message", "parts", "Content"):
        yield Case("keys", f"{key} for content", [{"role": "user", key: w.text()}], False)
        yield Case("keys", f"{key} for content, earlier", [{"role": "system", key: w.text()}, w.user()], False)
    for role in (
        "User",
        "SYSTEM",
        "human",
        "gpt",
        "model",
        "bot",
        "function",
        "ipython",
        "environment",
        " user",
        "",
        None,
        3,
    ):
        yield Case(
            "role", repr(role), [{"role": role, "content": w.text()}, w.user()], False, refused=role in ("", None, 3)
        )
    yield Case("role", "missing", [{"content": w.text()}, w.user()], False, refused=True)
    yield Case("role", "ShareGPT", [{"from": "human", "value": w.text()}], False, refused=True)
    for form, rows in {
        "none": [],
        "text": w.text(),
        "null": None,
        "texts": [w.text()],
        "one message": w.user(),
    }.items():
        yield Case("messages", form, rows, False, refused=True)
    yield Case("messages", "pairs", [["user", w.text()]], False, refused=True)
    yield Case("messages", "JSON text", json.dumps([w.user()]), False, refused=True)
