"""What a message of a data row may be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.images import check_media
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Most templates leave a message with another role out, and say nothing."""


def check_messages(messages: Sequence[Mapping[str, Any]], where: str, takes_images: bool = True) -> None:
    """Refuse messages with an unknown role, and with media that the model or this loop does not take.

    Args:
        where: named in errors, for example `data row 7`.

    Raises:
        ConfigError: there are such.
    """
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ROLES:
            continue
        near = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write one of these"
        raise ConfigError(
            f"{where}: message {index} has the role {show(role, 100)}, expected one of {list(ROLES)}; {hint}"
        )
    check_media([dict(message) for message in messages], where, takes_images)
