"""`ToolSession`: the tools of one conversation, from `create` to `release`.

Invariants:
- `create` runs at most once per tool and conversation, `release` exactly once for every `create` that began, also under
  cancellation, timeout and error; `execute` never runs after `release`;
- every call gets exactly one result, in the calls' order; a call that cannot be executed is answered with the reason;
- a tool may change a row's kwargs or its arguments: no other conversation, call or attempt sees the change;
- an exception of a tool's code becomes an answer to the model; a broken contract (a wrong return type) raises
  `ToolContractError`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.calls.invocation import Invocation, TimedOutError
from verl_multiturn.calls.slots import BusyError, Gates
from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.tasks import Alarms, finish, gather, keep
from verl_multiturn.tools.agent_data import AgentData
from verl_multiturn.tools.calls.answers import read_answer, read_reward
from verl_multiturn.tools.calls.gate import Gate
from verl_multiturn.tools.calls.results import CallResult, CallStatus, Run
from verl_multiturn.tools.loading.kwargs import bind_kwargs, copy_kwargs
from verl_multiturn.tools.loading.registry import METHODS

logger = logging.getLogger(__name__)

# Seconds beyond a request's budget: for calls that were given up to end, and for `release`.
_ABANDONED_S = 5.0
_RELEASE_S = 5.0


class ToolSession:
    """Tools of one request, used as an async context manager.

    Args:
        instance_id: Id of the conversation, passed to every method of every tool.
        tools: The request's tools, by name.
        tools_kwargs: The kwargs for the four methods of each tool (`read_tools_kwargs`).
        gates: The state of the tools that all conversations of the worker share.
        max_parallel_calls: Largest number of calls executed in one turn. The others are answered with a refusal.
        max_calls: Largest number of calls executed in the conversation; None for no limit.
        messages: The conversation's messages, a list that grows; for tools of verl 0.9, which take `agent_data`.
    """

    def __init__(
        self,
        instance_id: str,
        tools: Mapping[str, Any],
        tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]],
        gates: Gates[Gate],
        max_parallel_calls: int,
        max_calls: int | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._request_id = instance_id
        self._gates = {name: gates.of(tool) for name, tool in tools.items()}
        self._can_end = any(gate.ends_conversation for gate in self._gates.values())
        self._given = tools_kwargs
        self._kwargs: dict[tuple[str, str], dict[str, Any]] = {}
        self._max_parallel_calls = max_parallel_calls
        self._max_calls = max_calls
        self._executed = 0
        self.calls_used_up = False
        """True once a call was refused because of `max_calls`."""
        self.ended = False
        """True if a tool that ends the conversation has answered in the last turn."""
        self._instance_ids: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self._abandoned: dict[str, list[asyncio.Future[Any]]] = {}
        self._released = False
        self._agent_data = AgentData(instance_id, tools_kwargs, messages)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Values that tools of verl 0.9 left for the reward function."""
        return self._agent_data.extra_fields

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools for the chat template, in the tools' order."""
        return [gate.schema.as_dict() for gate in self._gates.values()]

    def ends(self, calls: Sequence[ToolCall | MalformedCall]) -> bool:
        """Return whether one of the calls names a tool that ends the conversation."""
        called = (self._gates.get(call.name) for call in calls if isinstance(call, ToolCall))
        return any(gate is not None and gate.ends_conversation for gate in called)

    async def __aenter__(self) -> ToolSession:
        for name, gate in self._gates.items():
            for method in METHODS:
                given = self._given.get(name, {}).get(f"{method}_kwargs", {})
                bound = bind_kwargs(gate.tool, method, given, self._request_id)
                self._kwargs[name, method] = copy_kwargs(bound, name, method, self._request_id)
        try:
            await gather([self._create(gate) for gate in self._gates.values()])
        except BaseException:  # whatever happened, release first
            await self._release_all()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._release_all()

    async def execute(self, calls: Sequence[ToolCall | MalformedCall]) -> list[CallResult]:
        """Run the calls of one turn in parallel, and return one result for each, in the calls' order.

        Raises:
            ToolContractError: A tool returned something that is no tool result, or the session has ended.
        """
        if self._released:
            raise ToolContractError("execute after release")
        running = 0
        checked: list[CallResult | tuple[Gate, ToolCall, dict[str, Any]]] = []
        for call in calls:
            ready = self._check(call)
            if not isinstance(ready, CallResult):
                if refusal := self._refusal(running):
                    ready = CallResult(call.id, ready[0].name, CallStatus.OVER_LIMIT, refusal)
                else:
                    running += 1
            checked.append(ready)
        self._executed += running
        runs = [self._run(*ready) for ready in checked if not isinstance(ready, CallResult)]
        ran = [await runs[0]] if len(runs) == 1 else await gather(runs)  # one call alone needs no task
        answered = ran
        if len(ran) < len(checked):
            answers = iter(ran)
            answered = [ready if isinstance(ready, CallResult) else next(answers) for ready in checked]
        if self._can_end:
            self.ended = any(
                result.status is CallStatus.OK and self._gates[result.tool].ends_conversation for result in answered
            )
        return answered

    async def calc_rewards(self) -> dict[str, float]:
        """Return each tool's reward for the conversation, by name.

        Left out: a tool whose `create` failed, whose `calc_reward` raised or was late, or whose reward is unusable.

        Raises:
            ToolContractError: A tool that derives from `BaseTool` returned a reward that is no number.
        """
        rewards: dict[str, float] = {}
        for name, instance_id in self._instance_ids.items():
            if name in self._broken:
                continue
            gate = self._gates[name]
            try:
                value = await self._call(gate, "calc_reward", gate.timeout_s, instance_id)
            except Exception as error:  # a tool's own code: log it, the conversation stays valid
                logger.warning("tool %r: calc_reward raised %s", name, describe(error))
                continue
            if (reward := read_reward(name, "calc_reward", value, gate.is_foreign)) is not None:
                rewards[name] = reward
        return rewards

    async def _create(self, gate: Gate) -> None:
        name = gate.name
        # Note it before the await: a create that began is released, however it ends.
        self._instance_ids[name] = self._request_id
        try:
            created = await self._call(gate, "create", gate.timeout_s, self._request_id)
        except Exception as error:  # a tool's own code: the model is told at each call of the tool
            self._broken[name] = describe(error)
            logger.warning("tool %r: create raised %s", name, self._broken[name])
            return
        # verl 0.4's tools return the id, verl 0.9's the id and a response; ours return None.
        given = created[0] if isinstance(created, tuple) and created else created
        if given is not None:
            if not isinstance(given, str):
                raise ToolContractError(
                    f"tool {name!r}: create must return None or an instance id, got {show(created)}"
                )
            self._instance_ids[name] = given

    def _refusal(self, running: int) -> str:
        """Return the answer to a call that a limit forbids beside `running` others of its turn; empty if none does."""
        if self._max_calls is not None and self._executed + running >= self._max_calls:
            self.calls_used_up = True
            return f"Error: not executed, all {self._max_calls} tool calls are used up; answer without calling one"
        if running >= self._max_parallel_calls:
            return (
                f"Error: not executed, at most {self._max_parallel_calls} call(s) are executed in one turn; "
                "call it again"
            )
        return ""

    def _check(self, call: ToolCall | MalformedCall) -> CallResult | tuple[Gate, ToolCall, dict[str, Any]]:
        """Return the answer to a call that cannot be executed; otherwise the arguments of `_run`."""
        if isinstance(call, MalformedCall):
            return CallResult(call.id, "", CallStatus.MALFORMED, f"Error: {call.problem}")
        gate = self._gates.get(call.name)
        if gate is None:
            known = ", ".join(self._gates) or "none"
            text = f"Error: there is no tool {call.name!r:.100}; the tools are: {known}"
            return CallResult(call.id, "", CallStatus.UNKNOWN_TOOL, text)
        if call.name in self._broken:
            text = f"Error: the tool is not available ({self._broken[call.name]})"
            return CallResult(call.id, call.name, CallStatus.ERROR, text)
        arguments, problem = gate.schema.read_arguments(call.arguments)
        if arguments is None:
            return CallResult(call.id, call.name, CallStatus.BAD_ARGUMENTS, f"Error: {problem}")
        return gate, call, arguments

    async def _run(self, gate: Gate, call: ToolCall, arguments: dict[str, Any]) -> CallResult:
        """Answer a call that can be executed: from the cache, or by the tool once the call has a slot.

        cache ──known──────────────────────────────→ OK
          ↓
        slot ───none in time───────────────────────→ OVERLOADED
          ↓
        execute, again while it fails and may be repeated
          ├─ returned → read_answer → cache ───────→ OK
          ├─ late ─────────────────────────────────→ TIMEOUT
          ├─ raised ───────────────────────────────→ ERROR
          └─ broke its contract, or we are cancelled: raised
        and in any case the slot is given back, when what runs of the call has ended
        """
        key = None
        if gate.limits.cache:
            kwargs = [self._kwargs[gate.name, method] for method in ("create", "execute")]
            key = gate.cache_key(arguments, kwargs)
            if (known := gate.cached(key)) is not None:
                return Run(gate, call).answered(known)
        run, lease = Run(gate, call), None
        if not gate.try_enter():
            try:
                lease = await gate.enter()
            except BusyError as error:
                run.enter()
                return run.failed(CallStatus.OVERLOADED, f"Error: {error}")
            run.enter()
        try:
            answer = read_answer(
                gate.name, await self._execute(run, arguments), gate.limits.response_characters, gate.is_foreign
            )
        except ToolContractError:
            raise
        except TimedOutError:
            return run.failed(CallStatus.TIMEOUT, f"Error: the tool did not answer within {gate.timeout_s:g} s")
        except ValueError as error:
            return run.failed(CallStatus.ERROR, f"Error: {message_of(error) or describe(error)}")
        except Exception as error:  # a tool's own code: tell the model
            return run.failed(CallStatus.ERROR, f"Error: {describe(error)}")
        finally:
            if run.left:
                _leave_later(gate, lease, run.left)
            else:
                gate.leave(lease)
        gate.remember(key, answer)
        return run.answered(answer)

    async def _execute(self, run: Run, arguments: dict[str, Any]) -> Any:
        """Call `execute`, again while it fails and may be repeated within the call's time, and return what it returned.

        Raises:
            TimedOutError: The tool did not answer in time.
            Exception: The tool raised it, in its last attempt.
        """
        gate, loop = run.gate, asyncio.get_running_loop()
        until = run.started + gate.timeout_s
        while True:
            run.attempts += 1
            alarms = gate.alarms if run.attempts == 1 else Alarms(until - loop.time())
            given = copy.deepcopy(arguments) if gate.limits.retries else arguments
            invocation = self._start(gate, "execute", self._instance_ids[gate.name], given)
            try:
                await invocation.ended(alarms)
                return invocation.result()
            except (TimedOutError, asyncio.CancelledError):
                run.left = self._give_up(gate, invocation)
                raise
            except (ToolContractError, ValueError):
                raise
            except Exception:  # a tool's own code
                wait_s = gate.limits.backoff_s * 2 ** (run.attempts - 1) * random.uniform(0.5, 1)
                if run.attempts > gate.limits.retries or loop.time() + wait_s >= until:
                    raise
            await asyncio.sleep(wait_s)

    async def _release_all(self) -> None:
        if self._released:
            return
        self._released = True
        held = [name for name in self._instance_ids if "release" not in self._gates[name].inherited]
        if held or any(self._abandoned.values()):
            # Also a cancelled conversation waits until its tools are released.
            await finish(asyncio.gather(*(self._release(self._gates[name]) for name in self._instance_ids)))

    async def _release(self, gate: Gate) -> None:
        # A call that was given up may still run; wait for its end, but not for ever.
        if abandoned := [task for task in self._abandoned.get(gate.name, []) if not task.done()]:
            await asyncio.wait(abandoned, timeout=_ABANDONED_S)
        try:
            await self._call(gate, "release", _RELEASE_S, self._instance_ids[gate.name])
        except Exception as error:  # a tool's own code: log it, nothing depends on it any more
            logger.warning("tool %r: release raised %s", gate.name, describe(error))

    async def _call(self, gate: Gate, method: str, timeout_s: float, instance_id: str) -> Any:
        """Call a method other than `execute`.

        Raises:
            TimedOutError: The method did not return in time.
            Exception: The tool raised it.
        """
        if method in gate.inherited:  # BaseTool's own method does nothing
            return 0.0 if method == "calc_reward" else None
        invocation = self._start(gate, method, instance_id)
        try:
            await invocation.ended(gate.alarms if method != "release" else Alarms(timeout_s, is_fair=False))
            return invocation.result()
        except (TimedOutError, asyncio.CancelledError):
            self._give_up(gate, invocation)
            raise

    def _start(self, gate: Gate, method: str, *arguments: Any) -> Invocation:
        # Give each call a copy: a change reaches no other call, and the cache's key is made of what the row gave.
        kwargs = copy.deepcopy(self._kwargs[gate.name, method])
        if method == "execute" and kwargs.get("agent_data", self) is None:
            kwargs["agent_data"] = self._agent_data
        function = getattr(gate.tool, method)
        return Invocation(function, gate.is_coroutine[method], arguments, kwargs, gate.task_names[method])

    def _give_up(self, gate: Gate, invocation: Invocation) -> list[asyncio.Future[Any]]:
        """Stop a call that nobody waits for any more, and return its tasks and threads that still run."""
        left = invocation.stop()
        self._abandoned.setdefault(gate.name, []).extend(left)
        for remaining in left:
            keep(remaining)
        return left


def _leave_later(gate: Gate, lease: str | None, left: Sequence[asyncio.Future[Any]]) -> None:
    """Give back a call's slot once all of its tasks and threads have ended."""
    asyncio.gather(*left, return_exceptions=True).add_done_callback(lambda _: gate.leave(lease))
