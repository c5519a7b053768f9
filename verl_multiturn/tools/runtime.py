"""`ToolSession`: the tools of one conversation, from `create` to `release`.

Invariants:
- `create` runs at most once per tool and conversation, `release` exactly once for every `create` that began, also under
  cancellation, timeout and error; `execute` never runs after `release`;
- every call gets exactly one result, in the calls' order: what cannot be executed is answered with the reason;
- what a tool's code raises is an answer to the model; what breaks the contract (a wrong return type) raises
  `ToolContractError`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verl_multiturn.chat.parsers import MalformedCall, ToolCall
from verl_multiturn.errors import ConfigError, ToolContractError
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.registry import METHODS

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 10.0


class CallStatus(StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    OVER_LIMIT = "over_limit"


@dataclass(frozen=True)
class CallResult:
    """One call's answer to the model, and what it says about the tool."""

    call_id: str
    tool: str
    status: CallStatus
    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def read_tools_kwargs(raw: Any, where: str) -> dict[str, dict[str, dict[str, Any]]]:
    """A row's `tools_kwargs` as `{tool: {"create_kwargs": {…}, …}}`.

    Keys whose value is None are left out: parquet gives every row the union of all rows' keys.

    Raises:
        ConfigError: it is no such mapping.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: tools_kwargs must map tool names to kwargs, got {raw!r:.200}")
    allowed = {f"{method}_kwargs" for method in METHODS}
    tools: dict[str, dict[str, dict[str, Any]]] = {}
    for name, methods in raw.items():
        if methods is None:
            continue
        if not isinstance(methods, Mapping):
            raise ConfigError(f"{where}: tools_kwargs[{name!r}] must be a mapping, got {methods!r:.200}")
        unknown = {key for key, value in methods.items() if value is not None} - allowed
        if unknown:
            raise ConfigError(
                f"{where}: tools_kwargs[{name!r}] has the unknown key {sorted(unknown)[0]!r}; "
                f"known are {sorted(allowed)}"
            )
        tools[name] = {
            key: {argument: given for argument, given in value.items() if given is not None}
            for key, value in methods.items()
            if value is not None
        }
    return tools


class ToolSession:
    """The tools one request has.

    Args:
        instance_id: handed to every method of every tool.
        tools: the request's tools by name.
        tools_kwargs: per tool, kwargs for each of the four methods (`read_tools_kwargs`).
        timeout_s: for each `create`, `execute` and `calc_reward`.
        max_parallel_calls: calls executed in one turn; the others are answered that they were not.
    """

    def __init__(
        self,
        instance_id: str,
        tools: Mapping[str, Any],
        tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]],
        timeout_s: float,
        max_parallel_calls: int,
    ) -> None:
        self._request_id = instance_id
        self._tools = dict(tools)
        self._kwargs = tools_kwargs
        self._timeout_s = timeout_s
        self._max_parallel_calls = max_parallel_calls
        self._instance_ids: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self._released = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas for the chat template, in the tools' order."""
        return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in self._tools.values()]

    async def __aenter__(self) -> ToolSession:
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._tools:
                    group.create_task(self._create(name))
        except BaseException as error:
            await self._release_all()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._release_all()

    async def execute(self, calls: Sequence[ToolCall | MalformedCall]) -> list[CallResult]:
        """Run the calls of one turn in parallel; one result for each, in the calls' order.

        Raises:
            ToolContractError: a tool returned something that is no tool result.
        """
        if self._released:
            raise ToolContractError("execute after release")
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, call in enumerate(calls):
                    tasks.append(group.create_task(self._execute(call, over_limit=index >= self._max_parallel_calls)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def calc_rewards(self) -> dict[str, float]:
        """Each created tool's reward for the conversation."""
        rewards: dict[str, float] = {}
        for name, instance_id in self._instance_ids.items():
            if name in self._broken:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    value = await self._call(name, "calc_reward", instance_id)
            except Exception as error:  # a tool's own code: counted and logged, the conversation stands
                logger.warning("tool %r: calc_reward raised %s: %s", name, type(error).__name__, error)
                continue
            if not isinstance(value, int | float):
                raise ToolContractError(f"tool {name!r}: calc_reward must return a number, got {value!r:.200}")
            rewards[name] = float(value)
        return rewards

    async def _create(self, name: str) -> None:
        # Noted before the await: a create that began is released, however it ends.
        self._instance_ids[name] = self._request_id
        try:
            async with asyncio.timeout(self._timeout_s):
                created = await self._call(name, "create", self._request_id)
        except Exception as error:  # a tool's own code: its calls are answered with this, the conversation goes on
            self._broken[name] = f"{type(error).__name__}: {error}"
            logger.warning("tool %r: create raised %s", name, self._broken[name])
            return
        # verl 0.4 returns the id, verl 0.9 the id and a response; ours nothing.
        given = created[0] if isinstance(created, tuple) and created else created
        if given is not None:
            if not isinstance(given, str):
                raise ToolContractError(
                    f"tool {name!r}: create must return None or an instance id, got {created!r:.200}"
                )
            self._instance_ids[name] = given

    async def _execute(self, call: ToolCall | MalformedCall, over_limit: bool) -> CallResult:
        def answer(status: CallStatus, text: str, tool: str = "") -> CallResult:
            return CallResult(call.id, tool, status, text)

        if isinstance(call, MalformedCall):
            return answer(CallStatus.MALFORMED, f"Error: {call.problem}")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return answer(
                CallStatus.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r:.100}; the tools are: {known}"
            )
        if over_limit:
            limit = self._max_parallel_calls
            text = f"Error: not executed, at most {limit} call(s) are executed in one turn; call it again"
            return answer(CallStatus.OVER_LIMIT, text, call.name)
        if call.name in self._broken:
            return answer(CallStatus.ERROR, f"Error: the tool is not available ({self._broken[call.name]})", call.name)
        arguments, problem = _read_arguments(tool, call.arguments)
        if arguments is None:
            return answer(CallStatus.BAD_ARGUMENTS, f"Error: {problem}", call.name)
        return await self._run(call, arguments)

    async def _run(self, call: ToolCall, arguments: dict[str, Any]) -> CallResult:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                returned = await self._call(call.name, "execute", self._instance_ids[call.name], arguments)
        except TimeoutError:
            text = f"Error: the tool did not answer within {self._timeout_s:g} s"
            return CallResult(call.id, call.name, CallStatus.TIMEOUT, text, seconds=loop.time() - started)
        except Exception as error:  # a tool's own code: the model is told, and may do better
            text = f"Error: {error}" if isinstance(error, ValueError) else f"Error: {type(error).__name__}: {error}"
            return CallResult(call.id, call.name, CallStatus.ERROR, text, seconds=loop.time() - started)
        text, reward, metrics = _read_result(call.name, returned)
        return CallResult(call.id, call.name, CallStatus.OK, text, reward, metrics, loop.time() - started)

    async def _release_all(self) -> None:
        if self._released:
            return
        self._released = True
        # A task of its own: a cancelled conversation still releases, and waits for it.
        releasing = asyncio.ensure_future(asyncio.gather(*(self._release(name) for name in self._instance_ids)))
        cancelled: asyncio.CancelledError | None = None
        while not releasing.done():
            try:
                await asyncio.shield(releasing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _release(self, name: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._call(name, "release", self._instance_ids[name])
        except Exception as error:  # a tool's own code: nothing depends on it any more
            logger.warning("tool %r: release raised %s: %s", name, type(error).__name__, error)

    async def _call(self, name: str, method: str, *arguments: Any) -> Any:
        bound = getattr(self._tools[name], method)
        given = dict(self._kwargs.get(name, {}).get(f"{method}_kwargs", {}))
        if method == "create" and not isinstance(self._tools[name], BaseTool):
            given = _foreign_create_kwargs(bound, given)
        if inspect.iscoroutinefunction(inspect.unwrap(bound)) or inspect.iscoroutinefunction(bound):
            return await bound(*arguments, **given)
        # A synchronous method would hold up every conversation of the worker.
        returned = await asyncio.to_thread(bound, *arguments, **given)
        return await returned if inspect.isawaitable(returned) else returned


def _foreign_create_kwargs(create: Any, given: dict[str, Any]) -> dict[str, Any]:
    """verl 0.4 tools take the kwargs one by one, verl 0.9 tools as one `create_kwargs`; either finds its own here."""
    parameters = inspect.signature(create).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    passed = {key: value for key, value in given.items() if takes_any or key in parameters}
    if takes_any or "create_kwargs" in parameters:
        passed["create_kwargs"] = given
    return passed


def _read_arguments(tool: Any, text: str) -> tuple[dict[str, Any] | None, str]:
    from verl_multiturn.tools.schema import ToolSchema

    schema = tool.tool_schema
    if not isinstance(schema, ToolSchema):
        # A tool that describes itself with verl's schema class.
        schema = ToolSchema.model_validate(schema.model_dump(exclude_unset=True, exclude_none=True))
    return schema.read_arguments(text)


def _read_result(name: str, returned: Any) -> tuple[str, float, dict[str, Any]]:
    """Text, step reward and metrics of what `execute` returned.

    Raises:
        ToolContractError: it is none of `ToolResponse`, `str`, or one of these with a reward and metrics.
    """
    response, reward, metrics = returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, 0.0, {})
    text = response.text if isinstance(response, ToolResponse) else response
    if not isinstance(text, str):
        # verl's ToolResponse: `text` may be None.
        text = getattr(response, "text", text)
        text = "" if text is None and hasattr(response, "text") else text
    if not isinstance(text, str) or not isinstance(reward, int | float | None) or not isinstance(metrics, dict | None):
        raise ToolContractError(
            f"tool {name!r}: execute must return ToolResponse, str, or (response, reward, metrics); "
            f"got {returned!r:.200}"
        )
    return text, float(reward or 0.0), dict(metrics or {})
