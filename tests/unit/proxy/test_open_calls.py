"""Which call of a turn an answer of a tool is for, where its client writes no id, or only the function's name."""

from typing import Any

import pytest

from verl_multiturn.proxy.sessions.open_calls import NamedCall, answered_calls, are_final, with_ids

TURN = [NamedCall("X", "f"), NamedCall("Y", "g"), NamedCall("Z", "g")]


def tool(id: str = "", name: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": "r"} | ({"tool_call_id": id} if id else {}) | ({"name": name} if name else {})


@pytest.mark.parametrize(
    ("answers", "indices"),
    [
        ([tool(), tool(), tool(), tool()], [0, 1, 2, None]),
        ([tool("Y"), tool(), tool()], [1, 0, 2]),
        ([tool("Y"), tool("Y"), tool()], [1, 1, 0]),
        ([tool(name="g"), tool(name="f"), tool(name="g")], [1, 0, 2]),
        ([tool(name="g"), tool(), tool()], [1, 0, 2]),
        ([tool("Z"), tool(name="g"), tool(name="g")], [2, 1, None]),
        ([tool(name="h"), tool()], [None, 0]),
        ([tool("Y", "f"), tool(name="f")], [1, 0]),
        ([tool("made up"), tool()], [None, 0]),
        ([tool(), tool("X"), tool("Z")], [1, 0, 2]),
        ([tool(name="g"), tool("Y")], [2, 1]),
        ([tool(), tool(name="f"), tool(name="g")], [2, 0, 1]),
        ([tool(), tool(name="g"), tool("Y")], [0, 2, 1]),
        ([tool(), {"role": "user", "content": "u"}, tool("X")], [1, None, 0]),
    ],
)
def test_an_answer_is_for_the_call_that_it_names_or_the_first_that_waits(
    answers: list[dict[str, Any]], indices: list[int | None]
) -> None:
    assert list(answered_calls(answers, 0, 0, TURN)) == indices


@pytest.mark.parametrize(
    ("unnamed", "ids"),
    [([tool("X"), tool("Y"), tool()], ["X", "Y", "X"]), ([tool(), tool("Y"), tool("X")], ["X", "Y", "X"])],
)
def test_of_calls_with_one_id_each_gets_an_answer_whether_that_names_it_or_not(
    unnamed: list[dict[str, Any]], ids: list[str]
) -> None:
    turn = [NamedCall("X", "f"), NamedCall("Y", "f"), NamedCall("X", "f")]
    named = with_ids(unnamed, 0, turn)
    assert [each.get("tool_call_id") for each in named] == ids
    for given in (unnamed, named):
        assert list(answered_calls(given, 0, 0, turn)) == [0, 1, 2]


def test_an_unknown_id_beside_a_call_without_one_leaves_the_others_unknown() -> None:
    turn = [NamedCall("", "f"), NamedCall("Y", "g")]
    answers = [tool("made up"), tool(), tool(name="g"), tool("Y")]
    assert list(answered_calls(answers, 0, 0, turn)) == [None, None, None, 1]
    assert list(answered_calls(answers[::-1], 0, 0, turn)) == [1, None, None, None]


def test_the_messages_get_the_ids_of_the_calls_that_they_name() -> None:
    given = [{"role": "user", "content": "q"}, tool(name="g"), tool(name="f"), tool("Z")]
    found = with_ids(given, 1, TURN)
    assert [each.get("tool_call_id") for each in found] == [None, "Y", "X", "Z"]
    assert with_ids(given[3:], 0, TURN) is not None
    assert found[0] is given[0]


def test_the_calls_of_a_clients_own_turn() -> None:
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": each.id, "function": {"name": each.function, "arguments": "{}"}} for each in TURN],
    }
    messages = [turn, tool("X"), tool(name="g")]
    assert list(answered_calls(messages, 0)) == [None, 0, 1]
    assert list(answered_calls(messages, 2)) == [1]
    assert list(answered_calls([*messages, tool(name="g"), turn, tool("Z")], 3)) == [2, None, 2]
    assert list(answered_calls([turn, turn, tool()], 0)) == [None, None, 0]
    assert list(answered_calls(messages, 3)) == []


def test_a_further_answer_may_change_those_without_an_id() -> None:
    user, turn = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    assert are_final([turn, tool("X"), tool()], 2)
    assert are_final([turn, tool()], 2)
    assert are_final([turn, tool(), user, turn, tool("X")], 2)
    assert not are_final([turn, tool(), tool("X")], 2)
    assert not are_final([turn, tool(), user, tool("X")], 2)
    assert not are_final([turn, tool(), tool("Y"), tool("X")], 3)
