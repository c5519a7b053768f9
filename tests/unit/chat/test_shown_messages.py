"""Search in a prompt for the texts of a row."""

import json
from typing import Any

import pytest

from verl_multiturn.chat.content_check import check_messages_shown, check_tools_shown, reasoning_left_out, spoken_texts
from verl_multiturn.chat.template_form import MessageError

HARD = "a <b> \"q\" 'y' \\ & ü\nnext"
HTML_SAFE = json.dumps(HARD).translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&'"})
USER = {"role": "user", "content": "Go."}


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(**arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f7", "arguments": arguments}}]


@pytest.mark.parametrize(
    "written",
    [
        HARD,
        json.dumps(HARD),
        json.dumps(HARD, ensure_ascii=False),
        json.dumps(HARD)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("'", "\\u0027"),
        repr(HARD),
    ],
)
def test_a_text_is_shown_in_every_form_of_writing_it(written: str) -> None:
    check_messages_shown([said("user", f"  {HARD}\n")], f"<user>{written}</user>")


@pytest.mark.parametrize(
    ("messages", "text", "error"),
    [
        (
            [said("user", "Stop.")],
            "<user></user>",
            "message 0 (user): the chat template does not show its content, 'Stop.",
        ),
        ([USER, said("tool", "r7")], "Go.", "message 1 (tool): the chat template does not show its content, 'r7'"),
        ([USER, USER], "Go.", "message 1 (user)"),
        ([said("assistant", "", tool_calls=calls())], "f8", "tool_calls[0].function.name, 'f7'"),
        ([said("assistant", "", tool_calls=calls(a=1))], "f7 b 1", "tool_calls[0].function.arguments, {'a': 1}"),
        ([said("assistant", "", tool_calls=calls(a={"b": ["c7"]}))], "f7 a b", "tool_calls[0].function.arguments"),
        ([said("user", [{"type": "text", "text": "a7"}, {"type": "text", "text": "b7"}])], "a7", "content, 'b7'"),
    ],
)
def test_what_is_not_shown_is_refused(messages: Any, text: str, error: str) -> None:
    with pytest.raises(MessageError) as caught:
        check_messages_shown(messages, text)
    assert error in str(caught.value)


def test_values_are_shown_as_json_or_python() -> None:
    message = said("assistant", "", tool_calls=calls(t=True, n=None, x=1e22, i=-3, d={"k": [0.5]}))
    check_messages_shown([message], '{"f7": {"t": true, "n": null, "x": 1e+22, "i": -3, "d": {"k": [0.5]}}}')
    check_messages_shown([message], "f7(t=True, n=None, x=1e+22, i=-3, d={'k': [0.5]})")


def test_reasoning_is_not_said_and_counted() -> None:
    messages = [said("assistant", "<think>\nwhy\n</think>\n\nyes", reasoning_content=""), said("assistant", "no")]
    check_messages_shown(messages, "yes no")
    assert reasoning_left_out(messages, "yes no") == 1
    assert reasoning_left_out(messages, "<think>\nwhy\n</think>\n\nyes no") == 0
    assert reasoning_left_out([said("assistant", "yes", reasoning_content="why")], "yes") == 1
    assert spoken_texts("why</think>yes") == ["yes"]
    assert spoken_texts("so <think>why</think>yes<think>b</think>") == ["so ", "yes", ""]
    assert spoken_texts("no mark") == ["no mark"]
    with pytest.raises(MessageError, match="does not show its content, 'so '"):
        check_messages_shown([said("assistant", "so <think>why</think>yes")], "yes")


def test_tools_are_shown_with_their_descriptions() -> None:
    schemas = [tool("look7", "Look it up.\nThen say.")]
    check_tools_shown(schemas, [USER], "// Look it up.\n// Then say.\nlook7", True)
    with pytest.raises(MessageError, match="does not show the tool 'look7'; describe it in the system message"):
        check_tools_shown(schemas, [USER], "nothing", True)
    with pytest.raises(MessageError, match="does not show the description of the tool 'look7'"):
        check_tools_shown(schemas, [USER], "look7", True)


def test_where_a_template_shows_no_tools_a_message_names_them() -> None:
    schemas = [tool("look7", "Look it up.")]
    check_tools_shown(schemas, [said("system", "Call look7 so."), USER], "", False)
    with pytest.raises(MessageError, match="does not show the tool 'look7'"):
        check_tools_shown(schemas, [USER, said("assistant", "look7"), USER], "look7", False)


def test_an_error_has_the_place_in_the_row() -> None:
    error = MessageError("it is lost; leave it out", 2, "tool")
    assert str(error) == "message 2 (tool): it is lost; leave it out"
    assert str(error.at("data row 7", 1)) == "data row 7: message 3 (tool): it is lost; leave it out"
    assert str(MessageError("lost", 0, "user").at("", 1)) == "message 0 (user): lost"
    assert str(MessageError("lost").at("data row 7", 1)) == "data row 7: lost"
