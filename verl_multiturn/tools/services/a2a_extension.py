"""Our extension of A2A: tools with their schemas in an agent's card, and calls of them in messages.

A skill of A2A has no schema, and its `data` parts turn 1 into 1.0. So the card has the schemas as JSON text:

    capabilities.extensions: [{uri: urn:verl-multiturn:a2a:tools:1, params: {tools: '[{"type": "function", …}]'}}]

A call is the text of a message: `{"tool": "add", "arguments": {"a": 1}}`. `{"end": true}` ends a session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

URI = "urn:verl-multiturn:a2a:tools:1"
"""Names the extension in a card. A change that older clients cannot read gets another number."""
KEY = "tools"
"""Key of the schemas in the extension's `params`."""
END = json.dumps({"end": True})
"""Text of the message that ends a session."""
MISSING = "a2a needs the package a2a-sdk, 1.3 or newer; install it: pip install 'a2a-sdk[http-server]>=1.3,<2'"
_FORM = 'send JSON text such as {"tool": "NAME", "arguments": {}}'


def schemas_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return schemas as the card holds them: one text of ASCII, in which no value and no order changes."""
    return json.dumps(list(schemas))


def read_schemas(text: Any) -> list[Any]:
    """Read the schemas from the text of a card.

    Raises:
        ValueError: It is no JSON text of a list.
    """
    schemas = json.loads(text) if isinstance(text, str) else None
    if not isinstance(schemas, list):
        raise ValueError(f"expected JSON text of a list of schemas, got {text!r:.100}")
    return schemas


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the text of a message."""
    return json.dumps({"tool": name, "arguments": arguments})


def read_call(text: str) -> tuple[str, str] | None:
    """Read the text of a message.

    Args:
        text: The text.

    Returns:
        The name of the tool, and its arguments as JSON text; None: the session shall end.

    Raises:
        ValueError: It is no call; the message has the remedy.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text!r:.100} is no call of a tool; {_FORM}") from None
    if said == {"end": True}:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("tool"), str):
        raise ValueError(f"{text!r:.100} names no tool; {_FORM}")
    if strange := sorted(set(said) - {"tool", "arguments"}):
        raise ValueError(f"{strange[0]!r:.100} is no part of a call; {_FORM}")
    return said["tool"], json.dumps(said.get("arguments", {}))
