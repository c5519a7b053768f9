"""The world of an interaction, for the check of a tool that shares it: `check-tool --interaction`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from verl_multiturn.checking.interaction_contract import interactions_to_check
from verl_multiturn.checking.method_calls import DEFAULT_TIMEOUT_S
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import check_kwargs, check_methods
from verl_multiturn.interactions.running.replies import InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession


class ToolWorld:
    """The interaction of a tool's conversations, begun and closed as the runtime does it.

    It belongs to one event loop.

    Args:
        interaction: The interaction.
        kwargs: A row's kwargs for it.
        timeout_s: Seconds after which a call counts as hanging, where the interaction's `limits` do not set them; None:
            `DEFAULT_TIMEOUT_S`.

    Raises:
        ConfigError: It cannot be called, or not with these kwargs.
    """

    def __init__(self, interaction: Interaction, kwargs: Mapping[str, Any], timeout_s: float | None) -> None:
        check_methods(interaction)
        check_kwargs(interaction, kwargs, "check-tool --interaction-kwargs")
        self._interaction = interaction
        self._kwargs = kwargs
        self._gate = InteractionGate(interaction, timeout_s or DEFAULT_TIMEOUT_S)
        self._sessions: dict[str, InteractionSession] = {}

    async def start(self, instance_id: str) -> None:
        """Begin the world of a conversation.

        Raises:
            ConfigError: It does not begin.
        """
        session = self._sessions[instance_id] = InteractionSession(self._gate, instance_id, self._kwargs)
        try:
            await session.start()
        except (InteractionFailedError, InteractionContractError) as error:
            raise ConfigError(f"{error}; run verl-multiturn check-interaction first") from None

    async def close(self, instance_id: str) -> None:
        """Close the world of a conversation."""
        if (session := self._sessions.pop(instance_id, None)) is not None:
            await session.__aexit__()

    async def aclose(self) -> None:
        """Close the rest."""
        for instance_id in list(self._sessions):
            await self.close(instance_id)
        returned = await asyncio.to_thread(self._interaction.aclose)
        if returned is not None:
            await returned


def load_world(target: str, kwargs: Mapping[str, Any], timeout_s: float | None) -> ToolWorld:
    """Return the world of the interaction that a command line names.

    Args:
        target: A class as `package.module.Class`, or the path of a YAML file; `FILE:NAME` where it has several.
        kwargs: As for `ToolWorld`.
        timeout_s: As for `ToolWorld`.

    Raises:
        ConfigError: There is no such interaction, or it cannot be called.
    """
    found = interactions_to_check(target, None)
    if len(found) > 1:
        names = [each.name for each in found]
        raise ConfigError(f"{target} has the interactions {names}; name one, as in {target}:{names[0]}")
    return ToolWorld(found[0], kwargs, timeout_s)
