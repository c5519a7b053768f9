"""The level `chat` of an evaluation: the parts of a recipe that a model behind a chat API cannot do, and its engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.formats import FORMATS
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.chat_address import ChatAddress
from verl_multiturn.rollout.engines.chat_engine import ChatEngine, TurnWriter
from verl_multiturn.verl_bridge.model.call_formats import make_parser
from verl_multiturn.verl_bridge.model.chat_setup import model_end_ids
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.names import AGENT_LOOP
from verl_multiturn.verl_bridge.settings import settings_of

_FORMAT = "hermes"
_ROLLOUT = "actor_rollout_ref.rollout"


def prepare(config: DictConfig) -> None:
    """Check that a recipe works through a chat API, and set the call format in which its turns are written down.

    Args:
        config: verl's whole configuration, prepared; its `multi_turn.format` is changed.

    Raises:
        ConfigError: It cannot.
    """
    rollout = config.actor_rollout_ref.rollout
    name, mode, top_k = rollout.multi_turn.format, settings_of(rollout).context.mode, rollout.val_kwargs.top_k
    if mode != "append":
        raise _refused(f"custom.multiturn.context.mode={mode}", "it is shown whole conversations", "append")
    if name not in FORMATS:
        why = "the endpoint writes calls as objects, and such a format reads them from text"
        raise _refused(f"{_ROLLOUT}.multi_turn.format={name}", why, _FORMAT)
    if top_k not in (None, -1, 0):
        raise _refused(f"{_ROLLOUT}.val_kwargs.top_k={top_k}", "OpenAI's API has no top_k", "-1")
    with open_dict(config):
        OmegaConf.update(config, f"{_ROLLOUT}.multi_turn.format", _FORMAT)


def check_loops(loops: Collection[str]) -> None:
    """Refuse rows of agents, whose sessions hand over ids alone.

    Raises:
        ConfigError: There are some.
    """
    for loop in sorted(set(loops) - {AGENT_LOOP}):
        raise ConfigError(
            f"the agent loop {loop!r} asks by ids, which chat completions do not take; point the agent itself at that "
            "endpoint, or name an address that ends in /v1"
        )


def make_engine(address: ChatAddress, model: LoadedModel, key: str | None) -> ChatEngine:
    """Make the engine of a model behind an endpoint.

    Args:
        address: The model behind the endpoint.
        model: The model in whose ids its turns are written down.
        key: API key; None: none is sent.

    Raises:
        ConfigError: The recipe's model takes images.
    """
    if model.processor is not None:
        raise ConfigError(
            "a model that takes images has placeholders for them in its ids, and an endpoint for chat completions gets "
            "none; name a model of text alone"
        )
    tokenizer: Any = model.tokenizer
    parser = make_parser(_FORMAT, tokenizer, model_end_ids(tokenizer))
    writer = TurnWriter(tokenizer, Firewall(tokenizer), parser, tokenizer.eos_token_id)
    return ChatEngine(address.url, address.model, writer, key=key)


def _refused(setting: str, why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{setting}: a model behind chat completions cannot be asked so: {why}; use {instead!r}, or name an address "
        "that ends in /v1"
    )
