"""The configuration, prompt and tools of conversations on a scripted engine, for tests and benchmarks."""

from __future__ import annotations

import json
from typing import Any

from omegaconf import OmegaConf

from tests.conftest import ROOT

MODEL = ROOT / "recipes" / "quickstart" / "model"
ANSWER = "The answer of the tool, always the same, some twenty words long, so that each turn adds as much as the last."
SCHEMA = {"type": "function", "function": {"name": "noop", "description": "Nothing.", "parameters": {"type": "object", "properties": {}, "required": []}}}  # fmt: skip  # noqa: E501
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Call it."}]


def large_schemas(size: int = 39_000) -> list[dict[str, Any]]:
    """Make schemas of tools, as MCP servers have them, that take `size` bytes of JSON or a little more."""
    schemas: list[dict[str, Any]] = []
    while len(json.dumps(schemas)) < size:
        described = {"type": "string", "description": f"What the tool needs to know. {ANSWER}"}
        properties = {f"argument_{index}": described for index in range(8)}
        parameters = {"type": "object", "properties": properties, "required": ["argument_0"]}
        function = {"name": f"tool_{len(schemas)}", "description": ANSWER, "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


def make_config(tokens: int, prompt_tokens: int = 2048) -> Any:
    """Make the part of verl's configuration that both loops read.

    Args:
        tokens: The most tokens of a response.
        prompt_tokens: The most tokens of a prompt.
    """
    multi_turn = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 10_000,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None,
        "format": "hermes",
    }
    lengths = {"prompt_length": prompt_tokens, "response_length": tokens}
    rollout = {**lengths, "full_determinism": False, "multi_turn": multi_turn}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
