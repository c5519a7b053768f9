"""A session of tools for tests, and a call for it."""

from typing import Any

from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.session import ToolSession

HI = ToolCall("echo", '{"text": "hi"}', "c1")


def session(*tools: Any, timeout_s: float = 0.05, **kwargs: Any) -> ToolSession:
    """Make a session of tools.

    Args:
        tools: The tools.
        timeout_s: Seconds that a call may take.
        kwargs: The row's `tools_kwargs`.
    """
    return ToolSession("r1", {tool.name: tool for tool in tools}, kwargs, Gates(Gate, timeout_s), 8)
