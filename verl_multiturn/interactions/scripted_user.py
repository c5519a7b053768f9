"""`ScriptedUser`: a user who sends the turns of the data row, one by one, and then leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction, Reply


class ScriptedUser(Interaction):
    """A user whose turns are in the row: `interaction_kwargs: {"scripteduser": {"turns": ["And in euros?"]}}`.

    The model answers every turn. Its answer to the last one ends the conversation.

    Args:
        config: Empty.
    """

    outage_limits = OutageLimits(mode="off")  # it calls no service

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        if config:
            raise ConfigError(f"ScriptedUser: config: it has none, got {show(config)}; turns are in the row")
        self._left: dict[str, list[str]] = {}

    def start(self, instance_id: str, *, turns: Sequence[str], opening: str | None = None) -> Reply | None:  # type: ignore[override]
        """Take the row's turns, and send the opening.

        Args:
            instance_id: Id of the conversation.
            turns: The user's turns after the model's first one.
            opening: The user's first turn, which comes after the row's messages; None: these end with it.

        Raises:
            ConfigError: `turns` is not a list of texts, or `opening` is not text.
        """
        # A row from a Parquet file may have an array here.
        texts = list(turns) if isinstance(turns, Iterable) and not isinstance(turns, str | bytes | Mapping) else None
        if texts is None or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ConfigError(
                f"interaction_kwargs of ScriptedUser: expected a list of texts as 'turns', got {show(turns)}; mend it"
            )
        if opening is not None and not (isinstance(opening, str) and opening.strip()):
            raise ConfigError(
                f"interaction_kwargs of ScriptedUser: expected a text as 'opening', got {show(opening)}; mend it"
            )
        self._left[instance_id] = [str(text) for text in reversed(texts)]
        return None if opening is None else Reply(text=str(opening))

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Send the next turn; after the last one, end the conversation."""
        left = self._left[instance_id]
        return Reply(text=left.pop()) if left else Reply(done=True)

    def close(self, instance_id: str) -> None:
        """Forget the conversation."""
        self._left.pop(instance_id, None)
