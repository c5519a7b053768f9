"""`BfclUser`: the user of BFCL's multi-turn dialogues, who sends one turn after the other and scores the model's calls.

    interaction_kwargs: {"bfcluser": {"id": "multi_turn_base_0"}}

The model calls the functions of the dialogue's worlds as tools (`tools.py`), and ends a turn with a message that calls
none. Then the turn is scored, and the user sends the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction, Reply
from verl_multiturn.task_sets.bfcl.episode import DialogueEpisode
from verl_multiturn.task_sets.bfcl.package import Dialogue, data_folder, dialogue_of, read_dialogue

EPISODES: dict[str, DialogueEpisode] = {}
"""The dialogues that are played in this process, by the id of the conversation; the tools make their calls in them."""


class BfclUserSettings(BaseModel):
    """Settings of the user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: Literal["turns", "all", "paper"] = "all"
    """The reward of a conversation, at most 1.

    - `turns`: each turn that is right earns an equal part, at once.
    - `all`: 1 if all turns are right.
    - `paper`: half for the share of the worlds that end in the right state, half for the share of the gold calls that
      were made in their turn.
    """


class BfclUser(Interaction):
    """The user of BFCL's dialogues.

    Args:
        config: `BfclUserSettings`.

    Raises:
        ConfigError: A setting is unknown or wrong, or the package is not installed.
    """

    outage_limits = OutageLimits(mode="off")  # the worlds are in this process

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        data_folder()
        self._reward = read_model(BfclUserSettings, config, "BfclUser: config").reward

    # The worlds are objects without locks: all that touches them runs on the event loop.
    async def start(self, instance_id: str, *, id: str = "", dialogue: str = "") -> Reply:  # type: ignore[override]
        """Begin a dialogue, and return its first turn.

        Args:
            instance_id: Id of the conversation.
            id: The id of one of BFCL's dialogues.
            dialogue: Or a dialogue of your own, as JSON in the form of BFCL's data, with the gold calls of each turn as
                `ground_truth`.

        Raises:
            ConfigError: There is no such dialogue, or both or none are given.
        """
        if bool(id) == bool(dialogue):
            raise ConfigError(
                f"interaction_kwargs of BfclUser: expected 'id' or 'dialogue', got {show([id, dialogue])}"
            )
        episode = DialogueEpisode(dialogue_of(id) if id else own_dialogue(dialogue))
        EPISODES[instance_id] = episode
        return Reply(text=episode.dialogue.turns[0])

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Score the turn that the model has ended, and return the next; after the last one, end the conversation."""
        episode = EPISODES[instance_id]
        verdict = episode.end_turn()
        metrics = {"turn_right": float(verdict.right)}
        reward = verdict.right / len(episode.dialogue.turns) if self._reward == "turns" else None
        if episode.over:
            return Reply(done=True, reward=reward, metrics={**metrics, "all_right": episode.score("all")})
        text, shows = episode.dialogue.turns[episode.turn], episode.dialogue.hidden.get(episode.turn, ())
        return Reply(text=text, reward=reward, metrics=metrics, shows=shows)

    async def score(self, instance_id: str) -> float:
        """Return the reward of the whole dialogue; 0 with `turns`, whose turns have had theirs."""
        return 0.0 if self._reward == "turns" else EPISODES[instance_id].score(self._reward)

    async def close(self, instance_id: str) -> None:
        """Forget the dialogue."""
        EPISODES.pop(instance_id, None)


def own_dialogue(text: str) -> Dialogue:
    """Read a dialogue of the data's author.

    Raises:
        ConfigError: It is not JSON, or not in the form of BFCL's data.
    """
    try:
        entry = json.loads(text)
        gold = entry["ground_truth"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"interaction_kwargs of BfclUser: dialogue {show(text)}: {type(error).__name__}: {error}; expected JSON in "
            "the form of BFCL's data, with 'ground_truth'"
        ) from None
    return read_dialogue(entry, gold)
