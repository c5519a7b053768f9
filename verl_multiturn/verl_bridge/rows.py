"""A row of verl's data set to a `Request`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.conversation import Request
from verl_multiturn.tools.kwargs import read_tools_kwargs


def make_request(
    row: Mapping[str, Any], tools: Mapping[str, Any], sampling: Mapping[str, Any], request_id: str
) -> Request:
    """The request of a row.

    Args:
        row: `raw_prompt` (messages), `tools_kwargs`, and `extra_info` with `need_tools_kwargs`, `tools_kwargs` and
            `tool_selection` as verl defines them.
        tools: all tools of the run. With `need_tools_kwargs` a request has those that its `tools_kwargs` name, else
            all; `tool_selection` narrows them further.

    Raises:
        ConfigError: the row asks for what cannot be.
    """
    extra_info = row.get("extra_info") or {}
    where = f"data row {extra_info.get('index', row.get('index', '?'))}"
    tools_kwargs = read_tools_kwargs(row.get("tools_kwargs") or extra_info.get("tools_kwargs"), where)
    chosen = dict(tools)
    if extra_info.get("need_tools_kwargs"):
        if not tools_kwargs:
            raise ConfigError(
                f"{where}: need_tools_kwargs is set, but tools_kwargs names no tool; name its tools there"
            )
        chosen = {name: tool for name, tool in chosen.items() if name in tools_kwargs}
    selection = extra_info.get("tool_selection")
    if selection is not None and len(selection):
        chosen = {name: tool for name, tool in chosen.items() if name in selection}
    messages = [_plain_message(message) for message in row["raw_prompt"]]
    return Request(request_id, messages, chosen, tools_kwargs, sampling)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the empty keys that parquet adds to every row of a column."""
    return {key: value for key, value in message.items() if value is not None}
