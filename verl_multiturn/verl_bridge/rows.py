"""The step from a row of verl's data set to a `Request`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_multiturn.chat.messages import check_last_speaker, read_messages
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import interaction_of_row
from verl_multiturn.rollout.outcome import Request
from verl_multiturn.tools.loading.kwargs import tools_of_row


def make_request(
    row: Mapping[str, Any],
    tools: Mapping[str, Any],
    sampling: Mapping[str, Any],
    request_id: str,
    takes_images: bool = False,
    interactions: Mapping[str, Interaction] | None = None,
) -> Request:
    """Build the request of a row; its images are not loaded yet.

    Args:
        row: `raw_prompt` (messages), `tools_kwargs`, `interaction_kwargs`, and `extra_info` with `need_tools_kwargs`,
            `tools_kwargs` and `tool_selection` as verl defines them.
        tools: All tools of the run, by name; `tools_of_row` chooses those of the request.
        sampling: Sampling parameters in the engine's own names.
        request_id: The request's unique id.
        takes_images: Whether the model takes images.
        interactions: All interactions of the run, by name; `interaction_of_row` chooses that of the request.

    Raises:
        ConfigError: The row's tools, `tools_kwargs` or `interaction_kwargs` do not fit the run, or its messages cannot
            be used.
    """
    where = row_name(row)
    chosen, tools_kwargs = tools_of_row(row, tools, where)
    messages = read_messages(row["raw_prompt"], where, takes_images)
    interaction, kwargs = interaction_of_row(row, interactions or {}, where)
    check_last_speaker(messages, interaction is not None, where)
    return Request(request_id, messages, chosen, tools_kwargs, sampling, interaction, kwargs, where)


def row_name(row: Mapping[str, Any]) -> str:
    """Return the name of a row in error messages, for example `data row 7`."""
    extra_info = row.get("extra_info")
    index = extra_info.get("index") if isinstance(extra_info, Mapping) else None
    return f"data row {row.get('index', '?') if index is None else index}"
