"""Checks of the messages of a data row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.images import check_media
from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have. Most templates silently leave a message with another role out."""


def check_messages(messages: Sequence[Mapping[str, Any]], where: str, takes_images: bool = True) -> None:
    """Refuse messages with an unknown role, or with media that the model or this agent loop does not take.

    Args:
        messages: The messages to check.
        where: Name of their source in errors, for example `data row 7`.
        takes_images: Whether the model takes images. Video and audio are always refused.

    Raises:
        ConfigError: There is such a message.
    """
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ROLES:
            continue
        hint = did_you_mean(str(role).lower(), ROLES) or "write one of these"
        raise ConfigError(
            f"{where}: message {index} has the role {show(role, 100)}, expected one of {list(ROLES)}; {hint}"
        )
    check_media([dict(message) for message in messages], where, takes_images)
