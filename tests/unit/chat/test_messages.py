"""Messages of rows in the forms that people write them in, and the one form that they are read into."""

import datetime
from typing import Any

import numpy as np
import pytest

from verl_multiturn import ConfigError
from verl_multiturn.chat.messages import check_last_speaker, plain, read_messages, written_messages

USER = {"role": "user", "content": "Go."}
CALLED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def called(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def arguments_of(messages: list[dict[str, Any]]) -> Any:
    return read_messages(messages, "row 0")[1]["tool_calls"][0]["function"]["arguments"]


def refusal(messages: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_messages(messages, "row 3")
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": None}, {"a": 1}),
        ({"a": {"b": {"c": None, "d": 2}}}, {"a": {"b": {"d": 2}}}),
        ({"a": {"b": None}, "c": 1}, {"a": {}, "c": 1}),  # an empty mapping; one that is missing is null itself
        ({"a": {}}, {"a": {}}),
        ([{"a": None, "b": [{"c": None, "d": 1}]}], [{"b": [{"d": 1}]}]),
        ({"a": [1, None, 3]}, {"a": [1, None, 3]}),
        ({"a": np.array([{"b": None, "c": np.int64(1)}], dtype=object)}, {"a": [{"c": 1}]}),
        ({"a": (np.float32(0.5), "x")}, {"a": [0.5, "x"]}),
        ({"a": "", "b": 0, "c": False, "d": []}, {"a": "", "b": 0, "c": False, "d": []}),
    ],
)
def test_nulls_of_mappings_are_off_at_every_depth(value: Any, expected: Any) -> None:
    assert plain(value) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a", "a"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"text": "a"}], "a"),
        (["a", "b"], "a\nb"),
        ({"type": "text", "text": "a"}, "a"),
        ([{"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        ([{"type": "output_text", "text": "a", "annotations": []}], "a"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        (np.array([{"type": "text", "text": "a", "image_url": None}], dtype=object), "a"),
        # Parquet gives each block the keys of all.
        ([{"type": "text", "text": "a", "image_url": {"url": None}}], "a"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u", "detail": None}}, "b"],
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "u"}},
                {"type": "text", "text": "b"},
            ],
        ),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_text_blocks_are_one_text(role: str, content: Any, expected: Any) -> None:
    assert read_messages([{"role": role, "content": content}], "row 0") == [{"role": role, "content": expected}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Paris"}, {"city": "Paris"}),
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris", "expr": None, "opts": {"deep": None}}, {"city": "Paris", "opts": {}}),
        ('{"city": null, "opts": {}}', {"city": None, "opts": {}}),  # an author's, since it is text
        ("", {}),
        ("  ", {}),
        ("null", {}),
        (None, {}),
        ({}, {}),
    ],
)
def test_arguments_are_a_mapping(arguments: Any, expected: Any) -> None:
    assert arguments_of(called(arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{city: Paris}", "row 3: message 1 (assistant): tool_calls[0]: function.arguments is '{city: Paris}', which"),
        ('"Paris"', "which is no JSON object"),
        ("[1]", "which is no JSON object"),
        (["Paris"], "which is no JSON object"),
        (5, "function.arguments is 5, which is no JSON object"),
        ('"{\\"city\\": \\"Paris\\"}"', "which is no JSON object"),  # encoded twice
        ('{"city": NaN}', "NaN is no number of JSON"),
        ('{"city": "Paris", "city": "Rome"}', "a key stands in it twice"),
        ("[" * 100_000, "which is no JSON"),
        ({"day": datetime.date(2024, 1, 2)}, "which JSON cannot hold (Object of type date is not JSON serializable)"),
        ({"x": float("nan")}, "which JSON cannot hold"),
        ({"x": b"a"}, "which JSON cannot hold"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, said: str) -> None:
    assert said in refusal(called(arguments))


def test_the_older_forms_of_calls_are_read() -> None:
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    old = [USER, {"role": "assistant", "content": None, "function_call": function}]
    flat = [USER, {"role": "assistant", "tool_calls": [function]}]
    for messages in (old, flat):
        assert read_messages(messages, "row 0")[1] == {"role": "assistant", "content": "", "tool_calls": [CALLED]}
    answer = read_messages([*old, {"role": "function", "name": "weather", "content": "ok"}], "row 0")[2]
    assert answer == {"role": "tool", "content": "ok", "name": "weather"}


@pytest.mark.parametrize("empty", [[], None, np.array([], dtype=object)])
def test_no_calls_are_no_field(empty: Any) -> None:
    messages = [{"role": "assistant", "content": "a", "tool_calls": empty, "function_call": None}]
    assert read_messages(messages, "row 0") == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(field: str) -> None:
    made = read_messages([{"role": "assistant", "content": "a", field: "why"}], "row 0")
    assert made == [{"role": "assistant", "content": "a", "reasoning_content": "why"}]


def test_further_fields_stay_for_a_template_that_shows_them() -> None:
    messages = [{"role": "user", "content": "a", "name": "ada", "refusal": None, "audio": {"id": None}, "id": "m1"}]
    assert read_messages(messages, "row 0") == [{"role": "user", "content": "a", "name": "ada"}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": 5}, "message 0 (user): content is 5; expected a text or a list of blocks"),
        ({"role": "user"}, "message 0 (user) has no content"),
        ({"role": "assistant", "content": None}, "message 0 (assistant) has no content"),
        ({"role": "user", "content": [{"type": "tool_use", "name": "f"}]}, "message 0 (user): content[0] is"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "lang": "de"}]}, "has lang='de'"),
        ({"role": "user", "content": [3]}, "content[0] is 3"),
        ({"role": "user", "content": "a", "tool_calls": [CALLED]}, "which only an assistant's message has"),
        ({"role": "user", "content": "a", "reasoning": "b"}, "which only an assistant's message has"),
        ({"role": "assistant", "content": "a", "tool_calls": "[]"}, "tool_calls is '[]'; expected a list"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "tool_calls[0] names no function"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0] is 5"),
        ({"role": "assistant", "tool_calls": [{**CALLED, "type": "custom"}]}, "has the type 'custom'"),
        ({"role": "assistant", "tool_calls": [{**CALLED, "result": "x"}]}, "result='x' is no part of a call"),
        ({"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}, "reasoning and thinking differ"),
        ({"role": "assistant", "tool_calls": [CALLED], "function_call": {"name": "f"}}, "keep one of them"),
        ({"from": "human", "value": "x"}, "message 0 has the role None"),
        ("Go.", "message 0 is 'Go.'"),
    ],
)
def test_what_no_template_shows_is_refused(message: Any, said: str) -> None:
    assert refusal([message]).startswith("row 3: message 0")
    assert said in refusal([message])


@pytest.mark.parametrize("prompt", [[], None, "Go.", {"role": "user"}])
def test_a_prompt_is_a_list_of_messages(prompt: Any) -> None:
    assert refusal(prompt).startswith("row 3: 'prompt' must be a non-empty list of messages")


def test_an_answer_that_names_another_tool_than_its_call_is_refused() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "name": "calculator", "content": "ok"}
    said = refusal([*called({}), answer])
    assert said.startswith("row 3: message 2 (tool): name='calculator', and the call 'c1' that it answers is one of")


def test_the_id_of_a_call_is_a_text_as_that_of_its_answer_is() -> None:
    said = refusal([USER, {"role": "assistant", "content": "", "tool_calls": [{"id": 7, **CALLED}]}])
    assert said == "row 3: message 1 (assistant): tool_calls[0]: id is 7; expected a text"


def turn(*answers: tuple[str | None, str], ids: tuple[str | None, ...] = ("a", "b", "c")) -> list[dict[str, Any]]:
    calls = [{**CALLED, "id": each} for each in ids]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return [USER, said, *({"role": "tool", "content": text, "tool_call_id": each} for each, text in answers)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (turn(("b", "B"), ("c", "C"), ("a", "A")), ["A", "B", "C"]),
        (turn(("c", "C"), ("b", "B")), ["B", "C"]),
        ([*turn(("b", "B"), ("a", "A")), *turn(("b", "B2"), ("a", "A2"))], ["A", "B", "A2", "B2"]),
        (turn(("b", "B"), (None, "A")), ["B", "A"]),  # its author is not known
        (turn(("b", "B"), ("other", "A")), ["B", "A"]),
        (turn(("b", "B"), ("b", "again"), ("a", "A")), ["B", "again", "A"]),
        (turn(("b", "B"), ("a", "A"), ids=(None, None)), ["B", "A"]),
    ],
)
def test_answers_stand_in_the_order_of_their_calls(messages: list[dict[str, Any]], expected: list[str]) -> None:
    read = read_messages(messages, "row 0")
    assert [message["content"] for message in read if message["role"] == "tool"] == expected


def test_a_prompt_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(3000):
        deep = {"a": deep}
    assert refusal(called(deep)) == "row 3: 'prompt' is nested too deeply; write deep arguments as text"


def test_a_row_that_ends_in_an_answer_needs_somebody_who_speaks_next() -> None:
    greeting = [{"role": "assistant", "content": "Hello."}]
    check_last_speaker(greeting, True, "row 4")
    check_last_speaker([*greeting, USER], False, "row 4")
    with pytest.raises(ConfigError, match="row 4 ends in the assistant's answer; leave it out, or put it into reward_"):
        check_last_speaker([USER, *greeting], False, "row 4")
    with pytest.raises(ConfigError, match="row 4 ends in the assistant's calls, and nothing answers them"):
        check_last_speaker(called({}), True, "row 4")


def test_a_file_keeps_arguments_as_text() -> None:
    messages = called({"city": "Zürich", "when": None})
    made = written_messages([*messages, {"role": "assistant", "content": "a", "tool_calls": []}])
    assert made[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert made[2] == {"role": "assistant", "content": "a"}
    assert written_messages(made) == made
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich", "when": None}
