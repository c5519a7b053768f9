"""The address of a model behind OpenAI's chat completions, as `--engine` names it: `URL/chat/completions#MODEL`."""

from __future__ import annotations

from typing import NamedTuple

from verl_multiturn.errors import ConfigError

_PATH = "/chat/completions"


class ChatAddress(NamedTuple):
    """A model behind an endpoint."""

    url: str
    """Address of the endpoint, which ends before `/chat/completions`."""
    model: str
    """Name of the model there."""

    @property
    def name(self) -> str:
        """Value in the place of the weights' hash, which is unknown."""
        return f"{self.model} at {self.url}"


def chat_address(engine: str) -> ChatAddress | None:
    """Return the model that `--engine` names; None where it names no chat completions.

    Raises:
        ConfigError: The address names no model, or names one where only chat completions have names.
    """
    address, _, model = engine.partition("#")
    address = address.rstrip("/")
    if not address.endswith(_PATH):
        if model:
            raise ConfigError(
                f"--engine {engine!r}: only an address that ends in {_PATH} names a model; leave #{model} out"
            )
        return None
    if not model.strip():
        raise ConfigError(
            f"--engine {engine!r} names no model, and an endpoint may have many; write it behind the address, as in "
            f"{address}#MODEL"
        )
    return ChatAddress(address.removesuffix(_PATH), model.strip())
