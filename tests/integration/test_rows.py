"""The tools and kwargs that a data row gets."""

from typing import Any

import pytest

from tests.conftest import make_schema
from tests.unit.tools import test_validate
from verl_multiturn import BaseTool, ConfigError, Request
from verl_multiturn.tools.loading.kwargs import tools_of_row
from verl_multiturn.verl_bridge.rows import make_request

pytestmark = pytest.mark.stack

TOOLS = {name: BaseTool({}, make_schema(name)) for name in ("a", "b", "c")}


def request(extra_info: dict[str, Any] | None = None, **row: Any) -> Request:
    raw_prompt = [{"role": "user", "content": "Q", "tool_calls": None}]
    return make_request({"raw_prompt": raw_prompt, "extra_info": extra_info, **row}, TOOLS, {"top_p": 1}, "r1")


def test_without_a_word_a_row_has_all_tools() -> None:
    made = request()
    assert list(made.tools) == ["a", "b", "c"]
    assert made.messages == [{"role": "user", "content": "Q"}]
    assert made.sampling == {"top_p": 1}


def test_need_tools_kwargs_leaves_those_that_are_named() -> None:
    # The rows of a file may have the keys of other rows' tools, without a value.
    kwargs = {"b": {"create_kwargs": {"x": 1}}, "c": None}
    made = request({"need_tools_kwargs": True, "tools_kwargs": kwargs})
    assert list(made.tools) == ["b"]
    assert made.tools_kwargs["b"] == {"create_kwargs": {"x": 1}}


def test_verl_hands_tools_kwargs_over_beside_extra_info() -> None:
    assert list(request({"need_tools_kwargs": True}, tools_kwargs={"a": {}}).tools) == ["a"]


def test_tool_selection_narrows() -> None:
    assert list(request({"tool_selection": ["c", "a"]}).tools) == ["a", "c"]


def test_a_row_that_needs_kwargs_and_has_none_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="data row 7: need_tools_kwargs is set"):
        request({"need_tools_kwargs": True, "index": 7})


def test_an_unknown_role_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"data row \?: message 0 has the role 'usr', .*did you mean 'user'\?"):
        make_request({"raw_prompt": [{"role": "usr", "content": "Q"}]}, TOOLS, {}, "r1")


@pytest.mark.parametrize(("extra_info", "said"), test_validate.ROWS)
def test_the_run_takes_what_validate_passes(extra_info: Any, said: str) -> None:
    row, tools = test_validate.as_verl_hands_it_over(extra_info), test_validate.TOOLS
    if said:
        with pytest.raises(ConfigError) as caught:
            make_request(row, tools, {}, "r1")
        assert str(caught.value).startswith("data row ?: ")
        assert said in str(caught.value)
    else:
        made = make_request(row, tools, {}, "r1")
        assert (made.tools, made.tools_kwargs) == tools_of_row(row, tools, "row")


def test_nulls_are_off_at_every_depth_of_a_rows_kwargs() -> None:
    kwargs = {"b": {"create_kwargs": {"x": {"y": None, "z": 1}, "only": {"w": None}, "seq": [{"v": None, "u": 2}]}}}
    made = request({"need_tools_kwargs": True, "tools_kwargs": kwargs})
    assert made.tools_kwargs["b"] == {"create_kwargs": {"x": {"z": 1}, "only": {}, "seq": [{"u": 2}]}}


def test_a_row_that_ends_in_an_answer_is_refused_by_name() -> None:
    prompt = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(ConfigError, match="data row 7 ends in the assistant's answer; leave it out, or put it into"):
        make_request({"raw_prompt": prompt, "extra_info": {"index": 7}}, TOOLS, {}, "r1")
    made = make_request({"raw_prompt": prompt[:1], "extra_info": {"index": 7}}, TOOLS, {}, "r1")
    assert made.row == "data row 7"
