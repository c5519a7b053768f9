"""`SimulatedUser`: a user whom a language model plays; `LlmUser` and `PolicyUser` choose the model.

Flipped roles: the model that plays the user reads the assistant's messages as `user` messages, and the user's as
`assistant` messages. So it writes the user's next message where it would write its own.

Invariants:
- the model that plays the user sees as much as a user would: no system message, no tool call, no tool response and none
  of the assistant's reasoning;
- the roles of its messages alternate and begin with `user`, because many chat templates refuse others;
- the user's text holds no stop word.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.chat.model_text import spoken
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction, Reply

_ROLE = (
    "You play the user in a conversation with an assistant. Write the user's next message, and nothing else. Stay in "
    "the part that is described below. Tell what the user knows only where it is asked for."
)
_LEAVING = "When the user has nothing more to say or to ask for, write {words}."
_BEGIN = "(The conversation begins.)"
_SILENCE = "(The assistant says nothing.)"


class UserSettings(BaseModel):
    """Settings of every simulated user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    persona: str = ""
    """Description of the user and of the user's wishes.

    A row may add to it: `interaction_kwargs: {name: {persona: …}}`.
    """

    stop_words: list[str] = ["###STOP###"]
    """Words with which the user ends the conversation. The model that plays the user is given the first one."""

    max_user_turns: int = Field(10, gt=0)
    """Most messages of the user; the conversation ends when the model has answered the last one."""

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Temperature of the user's messages; of a user that is trained it has to be the run's."""

    max_tokens: int = Field(512, gt=0)
    """Most tokens of one message of the user."""


class SimulatedUser(Interaction):
    """Base of the users whom a language model plays.

    Args:
        config: As in `Interaction`.
        settings: The settings in it.
    """

    def __init__(self, config: dict[str, Any], settings: UserSettings) -> None:
        super().__init__(config)
        if not all(word.strip() for word in settings.stop_words):
            raise ConfigError(
                f"{type(self).__name__}: config.stop_words: expected words, got {settings.stop_words}; "
                "leave the empty one out"
            )
        self._settings = settings
        self._personas: dict[str, str] = {}
        self._said: dict[str, int] = {}

    @property
    def temperature(self) -> float:
        """Return the temperature with which the user's text is sampled."""
        return self._settings.temperature

    @abstractmethod
    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the next text of the model that plays the user.

        Args:
            messages: The conversation with flipped roles, after the system message with the persona.
        """

    async def start(self, instance_id: str, *, persona: str | None = None) -> Reply | None:  # type: ignore[override]
        """Take the row's part of the persona. The row's own messages begin the conversation.

        Raises:
            ConfigError: There is no persona at all, or the row's is not text.
        """
        owner = type(self).__name__
        if persona is not None and not isinstance(persona, str):
            raise ConfigError(
                f"interaction_kwargs of {owner}: expected a text as 'persona', got {show(persona)}; mend the row"
            )
        texts = [text.strip() for text in (self._settings.persona, persona) if text and text.strip()]
        if not texts:
            raise ConfigError(
                f"{owner}: there is no persona; say who the user is and what the user wants, in the config or in the "
                "row's interaction_kwargs"
            )
        self._personas[instance_id] = self.part(texts)
        self._said[instance_id] = 0
        return None

    def part(self, texts: Sequence[str]) -> str:
        """Return the system message for the model that plays the user.

        Args:
            texts: Who the user is and the user's wishes, from the config and from the row.
        """
        words = self._settings.stop_words
        leaving = [_LEAVING.format(words=words[0])] if words else []
        return "\n\n".join([" ".join([_ROLE, *leaving]), *texts])

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Let the model that plays the user answer; end the conversation at a stop word, or after the last message."""
        if self._said[instance_id] == self._settings.max_user_turns:
            return Reply(done=True, truncated=True)
        left, text = await self.say(instance_id, messages)
        return Reply(text=text, done=left)

    async def say(self, instance_id: str, messages: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Let the model that plays the user write, and return whether the user leaves, and the text.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation as the assistant saw it.
        """
        text = await self.write(flipped(messages, self._personas[instance_id]))
        self._said[instance_id] += 1
        return without_stop_words(text, self._settings.stop_words)

    async def close(self, instance_id: str) -> None:
        """Forget the conversation."""
        self._personas.pop(instance_id, None)
        self._said.pop(instance_id, None)


def flipped(messages: Sequence[Mapping[str, Any]], persona: str) -> list[dict[str, str]]:
    """Return a conversation as the model that plays the user reads it.

    Args:
        messages: The conversation as the assistant saw it.
        persona: The system message for the model that plays the user.
    """
    turns: list[dict[str, str]] = []
    for message in messages:
        role = {"assistant": "user", "user": "assistant"}.get(str(message.get("role")))
        text = spoken(message)
        if role is None or not text:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        else:
            turns.append({"role": role, "content": text})
    if not turns or turns[0]["role"] != "user":
        turns.insert(0, {"role": "user", "content": _BEGIN})
    if turns[-1]["role"] != "user":
        turns.append({"role": "user", "content": _SILENCE})
    return [{"role": "system", "content": persona}, *turns]


def without_stop_words(text: str, stop_words: Sequence[str]) -> tuple[bool, str]:
    """Return whether a text has a stop word, and the text without any, stripped.

    The search goes on until none remains, since taking one out may bring another one together.
    """
    found = False
    while words := [word for word in stop_words if word in text]:
        found = True
        for word in words:
            text = text.replace(word, "")
    return found, text.strip()
