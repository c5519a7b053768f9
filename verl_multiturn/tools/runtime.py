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
import contextlib
import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

from verl_multiturn.chat.parsers import MalformedCall, ToolCall
from verl_multiturn.errors import ToolContractError
from verl_multiturn.tasks import finish
from verl_multiturn.tools.kwargs import bind_kwargs
from verl_multiturn.tools.registry import METHODS, schema_of

logger = logging.getLogger(__name__)

# The grace beyond a request's budget: for calls that were given up to end, and for `release`.
_ABANDONED_S = 5.0
_RELEASE_S = 5.0


class CallStatus(StrEnum):
    """How a call ended. After the first three the answer is the tool's, after the others it is ours."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    OVER_LIMIT = "over_limit"


EXECUTED = frozenset({CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT})


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


class ToolSession:
    """The tools one request has.

    Args:
        instance_id: handed to every method of every tool.
        tools: the request's tools by name.
        tools_kwargs: per tool, kwargs for each of the four methods (`read_tools_kwargs`).
        timeout_s: for each `create`, `execute` and `calc_reward`.
        max_parallel_calls: calls executed in one turn; the others are answered that they were not.
        max_calls: calls executed in all; None for no limit.
    """

    def __init__(
        self,
        instance_id: str,
        tools: Mapping[str, Any],
        tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]],
        timeout_s: float,
        max_parallel_calls: int,
        max_calls: int | None = None,
    ) -> None:
        self._request_id = instance_id
        self._tools = dict(tools)
        self._kwargs = tools_kwargs
        self._timeout_s = timeout_s
        self._max_parallel_calls = max_parallel_calls
        self._max_calls = max_calls
        self._executed = 0
        self.calls_used_up = False
        """Whether a call was refused because of `max_calls`."""
        self._instance_ids: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self._abandoned: dict[str, list[asyncio.Future[Any]]] = {}
        self._released = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas for the chat template, in the tools' order."""
        return [schema_of(tool).as_dict() for tool in self._tools.values()]

    async def __aenter__(self) -> ToolSession:
        for name, tool in self._tools.items():
            for method in METHODS:
                bind_kwargs(tool, method, self._given(name, method), self._request_id)
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._tools:
                    group.create_task(self._create(name))
        except BaseException as error:  # released whatever happened, then raised
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
                for call, refusal in zip(calls, self._refusals(calls), strict=True):
                    tasks.append(group.create_task(self._execute(call, refusal)))
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
                value = await self._call(name, "calc_reward", self._timeout_s, instance_id)
            except Exception as error:  # a tool's own code: logged, the conversation stands
                logger.warning("tool %r: calc_reward raised %s: %s", name, type(error).__name__, error)
                continue
            if not isinstance(value, Real):
                raise ToolContractError(f"tool {name!r}: calc_reward must return a number, got {value!r:.200}")
            rewards[name] = float(value)
        return rewards

    async def _create(self, name: str) -> None:
        # Noted before the await: a create that began is released, however it ends.
        self._instance_ids[name] = self._request_id
        try:
            created = await self._call(name, "create", self._timeout_s, self._request_id)
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

    def _refusals(self, calls: Sequence[ToolCall | MalformedCall]) -> list[str]:
        """For each call why a limit keeps it from being executed, or nothing; only calls of known tools count."""
        refusals, executed = [], 0
        for call in calls:
            refusal = ""
            if isinstance(call, ToolCall) and call.name in self._tools:
                if self._max_calls is not None and self._executed >= self._max_calls:
                    self.calls_used_up = True
                    refusal = (
                        f"Error: not executed, all {self._max_calls} tool calls are used up; answer without calling one"
                    )
                elif executed >= self._max_parallel_calls:
                    refusal = (
                        f"Error: not executed, at most {self._max_parallel_calls} call(s) are executed in one turn; "
                        "call it again"
                    )
                else:
                    executed += 1
                    self._executed += 1
            refusals.append(refusal)
        return refusals

    async def _execute(self, call: ToolCall | MalformedCall, refusal: str) -> CallResult:
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
        if refusal:
            return answer(CallStatus.OVER_LIMIT, refusal, call.name)
        if call.name in self._broken:
            return answer(CallStatus.ERROR, f"Error: the tool is not available ({self._broken[call.name]})", call.name)
        arguments, problem = schema_of(tool).read_arguments(call.arguments)
        if arguments is None:
            return answer(CallStatus.BAD_ARGUMENTS, f"Error: {problem}", call.name)
        return await self._run(call, arguments)

    async def _run(self, call: ToolCall, arguments: dict[str, Any]) -> CallResult:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            instance_id = self._instance_ids[call.name]
            returned = await self._call(call.name, "execute", self._timeout_s, instance_id, arguments)
        except _TimedOutError as error:
            text = f"Error: {error}"
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
        # A cancelled conversation still releases, and waits for it.
        await finish(asyncio.gather(*(self._release(name) for name in self._instance_ids)))

    async def _release(self, name: str) -> None:
        # A call that was given up may still be at work; release waits for its end, though not for ever.
        if abandoned := [task for task in self._abandoned.get(name, []) if not task.done()]:
            await asyncio.wait(abandoned, timeout=_ABANDONED_S)
        try:
            await self._call(name, "release", _RELEASE_S, self._instance_ids[name])
        except Exception as error:  # a tool's own code: nothing depends on it any more
            logger.warning("tool %r: release raised %s: %s", name, type(error).__name__, error)

    async def _call(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        """One method of one tool, in a task of its own: a tool that ignores its cancellation is left behind.

        Raises:
            _TimedOutError: no answer in time.
            Exception: what the tool raised.
        """
        tool = self._tools[name]
        kwargs = bind_kwargs(tool, method, self._given(name, method), self._request_id)
        threads: list[asyncio.Future[Any]] = []
        task = asyncio.ensure_future(_invoke(getattr(tool, method), arguments, kwargs, threads))
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._abandon(name, task, threads)
            raise
        if not done:
            self._abandon(name, task, threads)
            raise _TimedOutError(f"the tool did not answer within {timeout_s:g} s")
        if task.cancelled():
            raise RuntimeError("the tool was cancelled by its own code")
        return task.result()

    def _given(self, name: str, method: str) -> Mapping[str, Any]:
        return self._kwargs.get(name, {}).get(f"{method}_kwargs", {})

    def _abandon(self, name: str, task: asyncio.Future[Any], threads: list[asyncio.Future[Any]]) -> None:
        task.cancel()
        for left in (task, *threads):
            self._abandoned.setdefault(name, []).append(left)
            _given_up.add(left)
            left.add_done_callback(_forget)


class _TimedOutError(Exception):
    """A tool did not answer in time; apart from a TimeoutError of the tool's own."""


# The event loop holds its tasks weakly.
_given_up: set[asyncio.Future[Any]] = set()


def _forget(task: asyncio.Future[Any]) -> None:
    _given_up.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody reports it as never retrieved


async def _invoke(
    method: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any], threads: list[asyncio.Future[Any]]
) -> Any:
    """Call a method, be it a coroutine function or not; the end of a thread it takes is put into `threads`."""
    try:
        if inspect.iscoroutinefunction(inspect.unwrap(method)) or inspect.iscoroutinefunction(method):
            return await method(*arguments, **kwargs)
        # A synchronous method would hold up every conversation of the worker.
        threads.append(_in_thread(method, arguments, kwargs))
        returned = await asyncio.shield(threads[-1])
        return await returned if inspect.isawaitable(returned) else returned
    except SystemExit as error:
        # It would end the worker: asyncio hands it on to the event loop.
        raise RuntimeError(f"the tool called exit({error.code!r})") from error


def _in_thread(function: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
    """Run a function in a thread of its own; the future ends with it. A pool would be full once a few calls hang."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(*arguments, **kwargs)
        except BaseException as error:  # handed over to the waiting coroutine, whatever it is
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, value, failure)

    def settle(value: Any, failure: BaseException | None) -> None:
        if ended.done():
            return
        if failure is None:
            ended.set_result(value)
        else:
            is_stop = isinstance(failure, StopIteration | asyncio.CancelledError)
            ended.set_exception(RuntimeError(f"the tool raised {failure!r}") if is_stop else failure)

    threading.Thread(target=run, daemon=True, name=f"tool {getattr(function, '__qualname__', function)}").start()
    return ended


def _read_result(name: str, returned: Any) -> tuple[str, float, dict[str, Any]]:
    """Text, step reward and metrics of what `execute` returned.

    Raises:
        ToolContractError: it is none of `ToolResponse`, `str`, or one of these with a reward and metrics.
    """
    response, reward, metrics = returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, 0.0, {})
    text = response if isinstance(response, str) else getattr(response, "text", response)
    if text is None and hasattr(response, "text"):
        text = ""  # verl's ToolResponse without text
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ToolContractError(f"tool {name!r}: images and videos in a tool's response are not supported; return text")
    if not isinstance(text, str) or not isinstance(reward, Real | None) or not isinstance(metrics, dict | None):
        raise ToolContractError(
            f"tool {name!r}: execute must return ToolResponse, str, or (response, reward, metrics); "
            f"got {returned!r:.200}"
        )
    # A lone surrogate is no text: tokenizers and files refuse it.
    return text.encode("utf-8", "replace").decode(), float(reward or 0.0), dict(metrics or {})
