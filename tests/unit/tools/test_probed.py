"""Results of the checks on an error of an author's code: whose it is in a run."""

from typing import Any

import pytest

from tests.conftest import EchoTool
from verl_multiturn.calls.limits import set_limits
from verl_multiturn.checking.method_calls import CallProbe
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.running.gate import tool_owner


class Lost(Exception):
    pass


class Raises(EchoTool):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "outage", "expected"),
    [
        (Lost("gone"), {}, ", a bug in a run"),
        (Lost("gone"), {"errors": [Lost]}, ", an outage in a run"),
        (TimeoutError("late"), {}, ""),
        (TimeoutError("late"), {"timeouts": "outage"}, ", an outage in a run"),
        (ConnectionRefusedError("no"), {}, ", an outage in a run"),
        (ValueError("you"), {}, ""),
    ],
)
async def test_an_error_is_judged_by_the_limits_of_the_entry(
    error: Exception, outage: dict[str, Any], expected: str
) -> None:
    tool = Raises(error)
    set_limits(tool, {"outage": outage}, ToolLimits, "tool echo")
    said = (await CallProbe(tool_owner(tool), 60.0).call("execute", "id", {})).failure()
    assert said.startswith("raised ")
    assert said.rpartition(")")[2] == expected
