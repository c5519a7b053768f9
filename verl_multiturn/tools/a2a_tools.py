"""A2A tools: an agent that somebody else runs, as a tool of the model.

One entry of the YAML file covers an agent:

    - a2a:
        url: http://127.0.0.1:9999

The agent is one tool, `message`, whose description has its skills. An agent of our own server (`verl-multiturn a2a`)
has its tools in its card, by our extension (`tools/services/a2a_extension.py`): then each of them is a tool, with its
own schema. Each conversation is one of the agent's, and ends with it (`tools/services/a2a_client.py`).
"""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.loading.tool_filter import chosen_names
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.a2a_extension import KEY, MISSING, URI, call_text, read_schemas

try:
    from google.protobuf.json_format import MessageToDict

    from verl_multiturn.tools.services.a2a_card import A2aSettings, fetch_card
    from verl_multiturn.tools.services.a2a_client import A2aAgent
except ImportError as error:
    raise ConfigError(MISSING) from error


def a2a_tools(raw: Any, where: str) -> list[A2aTool]:
    """Return the tools of the agent that an entry names, after fetching its card.

    Args:
        raw: The value of `a2a` in the entry.
        where: The place that errors name, for example `tools.yaml: tools[0].a2a`.

    Raises:
        ConfigError: A setting is wrong, there is no card, the card cannot be used, or a pattern fits no skill.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping with 'url', got {raw!r:.200}")
    settings = read_model(A2aSettings, raw, where)
    card = fetch_card(settings, where)
    extensions = {each.uri: each for each in card.capabilities.extensions}
    if strange := [each.uri for each in extensions.values() if each.required and each.uri != URI]:
        raise ConfigError(
            f"{where}: the agent at {settings.label} demands the extension {strange[0]!r:.200}, which this client does "
            "not speak; name another agent"
        )
    agent, label = A2aAgent(settings, card, where), f"agent {settings.label}"
    if URI in extensions:
        return _extended(agent, MessageToDict(extensions[URI].params), where)
    skills = {each.name or each.id: each for each in card.skills}
    names = list(skills)
    if names or "include" in settings.model_fields_set or settings.exclude:  # an agent may name no skills
        names = sorted(chosen_names(names, settings.include, settings.exclude, label, where, "skill"), key=names.index)
    lines = [f"- {name}: {skills[name].description}" for name in names]
    schema = _schema(settings.prefix + card.name, "\n".join([card.description, *lines]).strip(), _MESSAGE, where)
    return [A2aTool(agent, schema)]


_MESSAGE = {
    "type": "object",
    "properties": {
        "message": {"type": "string", "description": "Message to the agent, which knows the earlier ones."},
    },
    "required": ["message"],
}


def _schema(name: str, description: str, parameters: Any, where: str) -> ToolSchema:
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64]
    function = {"name": plain, "description": description, "parameters": parameters}
    return ToolSchema.read({"type": "function", "function": function}, where)


def _extended(agent: A2aAgent, params: dict[str, Any], where: str) -> list[A2aTool]:
    """Return the tools that a card lists by our extension."""
    settings = agent.settings
    try:
        schemas = [ToolSchema.read(each, "its schema") for each in read_schemas(params.get(KEY))]
    except ValueError as error:  # a ConfigError is one, too
        raise ConfigError(f"{where}: the card of {settings.label} has tools that cannot be read: {error}") from None
    names = [each.function.name for each in schemas]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{where}: the card of {settings.label} lists two tools called {min(twice)!r}; mend it")
    chosen = chosen_names(names, settings.include, settings.exclude, f"agent {settings.label}", where)
    tools: list[A2aTool] = []
    for schema in schemas:
        name = schema.function.name
        if name in chosen:
            raw = schema.as_dict()
            named = {**raw, "function": {**raw["function"], "name": settings.prefix + name}}
            tools.append(_ExtendedTool(agent, ToolSchema.read(named, where) if settings.prefix else schema, name))
    return tools


class A2aTool(BaseTool):
    """An agent, to which the model sends messages. It takes no kwargs of a row.

    Args:
        agent: The agent.
        schema: The schema of the tool.
    """

    outage_limits = OutageLimits(addresses="service")
    schema_of_others = True
    """True: the schema's names come from the agent, so the author of the run cannot change them."""

    def __init__(self, agent: A2aAgent, schema: ToolSchema) -> None:
        super().__init__({}, schema)
        self.agent = agent

    async def create(self, instance_id: str) -> None:  # type: ignore[override]
        """Begin a conversation, of which the agent hears with the first message."""
        self.agent.enter(instance_id, self.name)

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> ToolResponse:  # type: ignore[override]
        """Send a message, and return the answer or the question of the agent.

        Raises:
            ValueError: The agent refuses the message, failed, or its answer is too large.
            OutageError: It is not there.
            ServiceFailedError: It broke off, or its answer cannot be read.
        """
        return await self.agent.ask(instance_id, parameters["message"])

    async def release(self, instance_id: str) -> None:  # type: ignore[override]
        """End the conversation: a task that has not ended is cancelled."""
        await self.agent.leave(instance_id, self.name)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self.agent.aclose()


class _ExtendedTool(A2aTool):
    """A tool of an agent that lists its tools by our extension.

    Args:
        agent: The agent.
        schema: The schema of the tool.
        remote_name: Its name at the agent.
    """

    def __init__(self, agent: A2aAgent, schema: ToolSchema, remote_name: str) -> None:
        super().__init__(agent, schema)
        self.remote_name = remote_name

    async def create(self, instance_id: str) -> None:  # type: ignore[override]
        """Begin a conversation, or take part in it: all tools of the agent have one session there."""
        # An id of our own: the first calls may run at once, before the agent could name one.
        self.agent.enter(instance_id, self.name, uuid4().hex)

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> ToolResponse:  # type: ignore[override]
        """Call the tool, and return its answer; raises as `A2aTool.execute` does."""
        return await self.agent.call(instance_id, call_text(self.remote_name, parameters))

    async def release(self, instance_id: str) -> None:  # type: ignore[override]
        """End the session, with the last tool."""
        await self.agent.leave(instance_id, self.name, ends=True)
