"""Which ways a recorded conversation took."""

from typing import Any

import pytest

from tests.support.sample_records import SCHEMA, sample_record, sample_session
from verl_multiturn.evaluation.tool_paths import Paths, paths_of


def with_calls(*calls: tuple[str, str, str]) -> dict[str, Any]:
    """Return a record with calls, each a tool, a name and a status."""
    one = sample_record()["calls"][0]
    return sample_record(calls=[{**one, "tool": tool, "name": name, "status": how} for tool, name, how in calls])


@pytest.mark.parametrize(
    ("calls", "taken"),
    [
        ([], ("no tool",)),
        ([("calculator", "calculator", "ok")], ("calculator",)),
        ([("calculator", "calculator", "timeout")], ("calculator",)),
        ([("", "", "malformed")], ("malformed",)),
        ([("", "calculater", "unknown_tool")], ("malformed",)),
        ([("calculator", "calculator", "bad_arguments")], ("malformed",)),
        ([("", "", "malformed"), ("calculator", "calculator", "ok")], ("calculator",)),
        ([("", "calculator", "over_limit")], ("calculator",)),
        ([("search", "search", "ok"), ("calculator", "calculator", "error")], ("calculator", "search")),
    ],
)
def test_a_conversation(calls: list[tuple[str, str, str]], taken: tuple[str, ...]) -> None:
    assert paths_of(with_calls(*calls)).taken == taken


def test_what_it_could_call() -> None:
    assert paths_of(sample_record()) == Paths(("calculator",), ("calculator",), False)


def test_an_agent_is_known_by_its_requests() -> None:
    record = sample_session()
    assert paths_of(record) == Paths(("calculator",), (), False)
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
    record["messages"].insert(1, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert paths_of(record).taken == ("calculator",)
    assert SCHEMA["function"]["name"] == "calculator"
    call["function"]["name"] = "calculater"  # type: ignore[index]
    assert paths_of(record).taken == ("malformed",)
