"""The calls of `check-tool`: with a row's kwargs, with arguments that it guesses, and with bad ones.

Invariant: a method is called with a copy of bound kwargs, as the runtime does.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.checking.method_calls import DEFAULT_TIMEOUT_S, CallProbe, ProbeResult
from verl_multiturn.describe import message_of, show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.rows.reward_numbers import USABLE
from verl_multiturn.tools.agent_data import AgentData
from verl_multiturn.tools.base import is_foreign
from verl_multiturn.tools.loading.kwargs import bind_kwargs, copy_kwargs
from verl_multiturn.tools.loading.registry import METHODS, schema_of
from verl_multiturn.tools.running.answers import as_error, read_answer, read_reward
from verl_multiturn.tools.running.gate import tool_owner
from verl_multiturn.tools.running.results import CallResult

_ENOUGH = 10_000_000
# A guessed number is small, since the tool may use it as a number of rounds.
_SMALL = 7


def own_id(created: Any, given: str) -> str:
    """Return a conversation's id: the one that `create` returned, otherwise the given one."""
    own = created[0] if isinstance(created, tuple) and created else created
    return own if isinstance(own, str) else given


def text_of(outcome: ProbeResult, name: str) -> str:
    """Return the text that the model would read of a call.

    Args:
        outcome: How the call ended.
        name: The tool's name, for errors.

    Raises:
        ToolContractError: The value is not a result of a tool.
    """
    if outcome.error is not None:
        return as_error(message_of(outcome.error))
    return read_answer(CallResult("", name), outcome.value, _ENOUGH, foreign=True).text


def reward_of(outcome: ProbeResult) -> str:
    """Return the step reward of a call as text; "0.0" where it has none."""
    value = outcome.value
    reward = value[1] if isinstance(value, tuple) and len(value) == 3 else None
    return show(0.0 if reward is None else reward)


class ProbeWorld(Protocol):
    """The state that a tool's conversations share with an interaction; `checking/tool_world.py` has one."""

    async def start(self, instance_id: str) -> None:
        """Begin the world of a conversation."""

    async def close(self, instance_id: str) -> None:
        """Close the world of a conversation."""

    async def aclose(self) -> None:
        """Close the rest."""


class ToolProbe(CallProbe):
    """A tool under examination.

    Args:
        tool: The tool.
        kwargs: The kwargs of a data row: `create_kwargs`, `execute_kwargs`, …
        timeout_s: As in `check_tool`.
        world: State that each conversation shares with an interaction, from before `create` until after `release`;
            None: nothing.

    Attributes:
        row: The kwargs of the data row.
    """

    def __init__(
        self,
        tool: Any,
        kwargs: Mapping[str, Mapping[str, Any]],
        timeout_s: float | None,
        world: ProbeWorld | None = None,
    ) -> None:
        super().__init__(tool_owner(tool), timeout_s)
        if timeout_s is None and (places := getattr(tool, "places", None)) is not None:
            # `create` starts a server then; where that fails, its own error comes first.
            self.timeout_s = max(self.timeout_s, places.settings.start_timeout_s + DEFAULT_TIMEOUT_S)
        self.tool = tool
        self.row = kwargs
        self.world = world
        self._worlds: dict[str, str] = {}
        """The id under which the world of a conversation began, by each id that the tool has for it."""
        self.schema = schema_of(tool)
        self._kwargs: dict[str, dict[str, Any]] = {}
        for method in METHODS:
            bound = bind_kwargs(tool, method, kwargs.get(f"{method}_kwargs", {}), "check-tool")
            self._kwargs[method] = copy_kwargs(bound, tool.name, method, "check-tool")
        self._agent_data: defaultdict[str, AgentData] = defaultdict(
            lambda: AgentData(uuid.uuid4().hex, {tool.name: kwargs})
        )
        self.given: list[tuple[str, Any, str]] | None = None
        """Calls while it is a list: method, its arguments, and their `repr` before the call."""

    def with_row(self, kwargs: Mapping[str, Mapping[str, Any]]) -> ToolProbe:
        """Return the same tool with the kwargs of another row.

        Raises:
            ConfigError: A method cannot be called with them.
        """
        other = ToolProbe(self.tool, kwargs, self.timeout_s, self.world)
        other.end_s = self.end_s
        return other

    def kwargs_of(self, method: str, arguments: tuple[Any, ...]) -> Mapping[str, Any]:
        """Return a copy of the row's kwargs for a call.

        Args:
            method: Name of the method.
            arguments: Positional arguments of the call.
        """
        kwargs = copy.deepcopy(self._kwargs[method])
        if method == "execute" and kwargs.get("agent_data", self) is None:
            kwargs["agent_data"] = self._agent_data[arguments[0]]
        if self.given is not None:
            self.given.append((method, (arguments, kwargs), repr((arguments, kwargs))))
        return kwargs

    async def call(self, method: str, *arguments: Any) -> ProbeResult:
        """Call a method as `CallProbe` does, in the world of its conversation."""
        await self._enter(arguments[0])
        outcome = await super().call(method, *arguments)
        await self._leave(method, arguments[0], outcome.value)
        return outcome

    async def cancel(self, method: str, wait: Callable[[], Awaitable[None]], *arguments: Any) -> tuple[bool, Any]:
        """Cancel a method as `CallProbe` does, in the world of its conversation."""
        await self._enter(arguments[0])
        ended, value = await super().cancel(method, wait, *arguments)
        await self._leave(method, arguments[0], value)
        return ended, value

    async def _enter(self, instance_id: str) -> None:
        if self.world is not None and instance_id not in self._worlds:
            self._worlds[instance_id] = instance_id
            await self.world.start(instance_id)

    async def _leave(self, method: str, instance_id: str, value: Any) -> None:
        if self.world is None:
            return
        began = self._worlds[instance_id]
        if method == "create":
            self._worlds[own_id(value, instance_id)] = began
        elif method == "release":
            self._worlds = {own: other for own, other in self._worlds.items() if other != began}
            await self.world.close(began)

    async def begin(self, instance_id: str | None = None) -> tuple[str, ProbeResult]:
        """Create a conversation, and return the id for its other methods and the outcome of `create`."""
        given = instance_id or uuid.uuid4().hex
        created = await self.call("create", given)
        return own_id(created.value, given), created

    async def converse(self, calls: Sequence[Mapping[str, Any]]) -> list[str]:
        """Run a whole conversation with calls of these arguments, and return the texts that the model would read."""
        instance_id, _ = await self.begin()
        outcomes = [await self.call("execute", instance_id, dict(arguments)) for arguments in calls]
        await self.call("release", instance_id)
        return [text_of(outcome, self.tool.name) for outcome in outcomes]


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Guess arguments from a schema's examples, defaults and types; check them against the schema."""
    value = _example(schema)
    return value if isinstance(value, dict) else {}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("examples"):
        return schema["examples"][0]
    for key in ("default", "const"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        options = [option for option in schema.get(key, []) if option.get("type") != "null"]
        if options:
            return _example(options[0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        return {name: _example(of) for name, of in properties.items() if name in required or of.get("examples")}
    if kind == "array":
        return [_example(schema.get("items") or {})] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        return min(least, schema.get("maximum", least))
    if kind == "boolean":
        return True
    return "example".ljust(schema.get("minLength", 0), "e")[: schema.get("maxLength", 100)]


def bad_arguments(schema: Mapping[str, Any], good: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return wrong arguments as a model may write them, by a short description; `good` are right ones."""
    names = list(schema.get("properties", {}))
    cases: dict[str, dict[str, Any]] = {"nothing": {}, "an unknown argument": {**good, "no_such_argument": 1}}
    for name in names:
        cases[f"{name!r} left out"] = {key: value for key, value in good.items() if key != name}
        for kind, value in (("null", None), ("a number", _SMALL), ("an array", []), ("an object", {"a": 1})):
            cases[f"{name!r} as {kind}"] = {**good, name: value}
        if isinstance(good.get(name), str):
            cases[f"{name!r} empty"] = {**good, name: ""}
            cases[f"{name!r} of a million characters"] = {**good, name: "x" * 1_000_000}
            cases[f"{name!r} with control characters"] = {**good, name: "\x00\x1b[31m \ud800 \u202e"}
    return cases


def as_call(arguments: Mapping[str, Any]) -> str:
    """Return arguments as the JSON text of a call."""
    return json.dumps(dict(arguments))


def is_result(tool: Any, outcome: ProbeResult) -> str:
    """Return the fault of the result of `execute`; an empty text if it is a result."""
    value, foreign = outcome.value, is_foreign(tool)
    try:
        read_answer(CallResult("", tool.name), value, _ENOUGH, foreign)
        reward = value[1] if isinstance(value, tuple) and not foreign else None
        if reward is not None and read_reward(tool.name, "execute", reward) is None:
            return f"the step reward must be a {USABLE}, got {show(reward)}"
    except ToolContractError as error:
        return str(error)
    return ""
