"""A row of verl's data set to a `Request`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl_multiturn.chat.messages import check_messages
from verl_multiturn.rollout.conversation import Request
from verl_multiturn.tools.kwargs import tools_of_row


def make_request(
    row: Mapping[str, Any],
    tools: Mapping[str, Any],
    sampling: Mapping[str, Any],
    request_id: str,
    takes_images: bool = False,
) -> Request:
    """The request of a row; its images are still what the row names.

    Args:
        row: `raw_prompt` (messages), `tools_kwargs`, and `extra_info` with `need_tools_kwargs`, `tools_kwargs` and
            `tool_selection` as verl defines them.
        tools: all tools of the run; `tools_of_row` says which of them the request has.
        takes_images: whether the model does.

    Raises:
        ConfigError: the row asks for what cannot be.
    """
    where = row_name(row)
    chosen, tools_kwargs = tools_of_row(row, tools, where)
    messages = [_plain_message(message) for message in row["raw_prompt"]]
    check_messages(messages, where, takes_images)
    return Request(request_id, messages, chosen, tools_kwargs, sampling)


def row_name(row: Mapping[str, Any]) -> str:
    """What errors call a row."""
    extra_info = row.get("extra_info")
    index = extra_info.get("index") if isinstance(extra_info, Mapping) else None
    return f"data row {row.get('index', '?') if index is None else index}"


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message, and the blocks of its content, without the empty keys that parquet adds to every row of a column."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, Iterable) and not isinstance(content, str | Mapping):
        plain["content"] = [_plain_block(block) for block in content]
    return plain


def _plain_block(block: Any) -> Any:
    return {key: value for key, value in block.items() if value is not None} if isinstance(block, Mapping) else block
