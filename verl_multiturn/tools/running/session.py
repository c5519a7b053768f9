"""`ToolSession`: the tools of one conversation, from `create` to `release`.

Invariants:
- `create` runs at most once per tool and conversation, `release` exactly once for every `create` that began, also under
  cancellation, timeout and error; `execute` never runs after `release`;
- a tool that is hidden is as unknown to the model as one that does not exist, until `show` names it;
- every call gets exactly one result, in the calls' order; a call that cannot be executed is answered with the reason;
- a tool may change a row's kwargs or its arguments: no other conversation, call or attempt sees the change;
- an exception of a tool's code becomes an answer to the model; a broken contract (a wrong return type) raises
  `ToolContractError`;
- the model does not see an answer of an outage that ends the conversation (`calls/outages`);
- a tool that cannot judge, for a cause of ours, raises `UnjudgedError`: then it is not a reward of 0.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from verl_multiturn.calls.calls import Calls
from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import next_try_s
from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import OutageEndError
from verl_multiturn.calls.slots import Gates, Slot
from verl_multiturn.calls.tasks import Alarms, gather
from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ToolContractError, UnjudgedError
from verl_multiturn.tools.agent_data import AgentData
from verl_multiturn.tools.loading.kwargs import bind_kwargs, copy_kwargs, hidden_tools
from verl_multiturn.tools.loading.registry import METHODS
from verl_multiturn.tools.running.answers import read_answer, read_failure, read_reward
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.places import ConversationPlaces
from verl_multiturn.tools.running.results import CallResult, CallStatus

logger = logging.getLogger(__name__)

BACKOFF_S = 0.5
"""Seconds before the first repetition of a call. The wait doubles with each further one."""


class ToolSession:
    """Tools of one request, used as an async context manager.

    Args:
        instance_id: Id of the conversation, passed to every method of every tool.
        tools: The request's tools, by name.
        tools_kwargs: The kwargs for the four methods of each tool, and which are hidden (`read_tools_kwargs`).
        gates: The state of the tools that all conversations of the worker share.
        max_parallel_calls: Largest number of calls executed in one turn. The others are answered with a refusal.
        max_calls: Largest number of calls executed in the conversation; None for no limit.
        messages: The conversation's messages, a list that grows; for tools of verl 0.9, which take `agent_data`.
    """

    def __init__(
        self,
        instance_id: str,
        tools: Mapping[str, Any],
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        gates: Gates[Gate],
        max_parallel_calls: int,
        max_calls: int | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._request_id = instance_id
        self._gates = {name: gates.of(tool) for name, tool in tools.items()}
        self._can_end = any(gate.ends_conversation for gate in self._gates.values())
        self._given = tools_kwargs
        self._shown = {name: gate for name, gate in self._gates.items() if name not in hidden_tools(tools_kwargs)}
        self._calls: dict[str, Calls] = {}
        self._places = ConversationPlaces(instance_id, self._gates.values())
        self._max_parallel_calls = max_parallel_calls
        self._max_calls = max_calls
        self._executed = 0
        self.calls_used_up = False
        """True once a call was refused because of `max_calls`."""
        self.ended = False
        """True if a tool that ends the conversation has answered in the last turn."""
        self.outages: dict[str, None] = {}
        """Names whose outage a call of the conversation hit, in order."""
        self.unjudged = ""
        """Why a tool's `calc_reward` could not judge the conversation, for a cause of ours; "" if each could."""
        self._lost = ""
        self._called: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        """Calls of `execute` of each name; those of them that hit an outage, and those that got no slot."""
        self._arguments: list[str] = []
        """Those of all calls: a later call may open an address, or read a text, that an earlier one brought."""
        self._broken: dict[str, str] = {}
        self._agent_data = AgentData(instance_id, tools_kwargs, messages)

    @property
    def lost(self) -> str:
        """Return the outage for which the conversation has to end; "" for none."""
        if self._lost or not self.outages:
            return self._lost
        is_judged = any(gate.is_judged(self._request_id) for gate in self._gates.values())
        return f"{', '.join(self.outages)}: a call met an outage" if is_judged else ""

    @property
    def shut_out(self) -> str:
        """Return the outage of which alone the conversation saw something; "" for none.

        That is one of a tool that it called twice or more, and that never answered: each call hit an outage, or got no
        slot, and one at least hit an outage. Whatever the run's breaker decides, it saw nothing else of the tool.
        """
        out = [
            name
            for name, calls in self._called.items()
            if self._failed[name] and calls == self._failed[name] + self._refused[name] > 1
        ]
        slots = ", or got no slot" if any(self._refused[name] for name in out) else ""
        return f"{', '.join(out)}: each of its calls met an outage{slots}" if out else ""

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Values that tools of verl 0.9 stored for the reward function."""
        return self._agent_data.extra_fields

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model is shown, for the chat template, in the tools' order."""
        return [gate.schema.as_dict() for gate in self._shown.values()]

    def show(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Let the model have hidden tools from now on, and return their schemas; those of tools it has are omitted.

        Args:
            names: Names of the conversation's tools.
        """
        new = {name: self._gates[name] for name in names if name not in self._shown}
        shown = self._shown | new
        self._shown = {name: gate for name, gate in self._gates.items() if name in shown}
        return [gate.schema.as_dict() for gate in new.values()]

    def ends(self, calls: Sequence[ToolCall | MalformedCall]) -> bool:
        """Return whether one of the calls names a tool that ends the conversation."""
        called = (self._shown.get(call.name) for call in calls if isinstance(call, ToolCall))
        return any(gate is not None and gate.ends_conversation for gate in called)

    async def __aenter__(self) -> ToolSession:
        self._calls = {name: self._calls_of(gate) for name, gate in self._gates.items()}
        try:
            for gate in self._gates.values():
                await gate.admit()
            await self._places.take()
            await gather([self._create(gate) for gate in self._gates.values()])
        except BaseException:  # whatever happened, release first
            await self._end()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end()

    @property
    def broken(self) -> Collection[str]:
        """Return the names of the tools whose `create` failed."""
        return self._broken.keys()

    async def create_again(self, name: str) -> None:
        """Release a tool whose `create` failed, and create it anew; a conversation does not, a server's client does.

        Args:
            name: Name of the tool.
        """
        gate = self._gates[name]
        await Calls.end([self._calls[name]])
        self._calls[name] = self._calls_of(gate)
        before = self._broken.pop(name)
        try:
            await self._create(gate)
        except asyncio.CancelledError:
            self._broken.setdefault(name, before)
            raise
        except ToolContractError as error:
            self._broken[name] = describe(error)
            logger.error("tool %r: %s", name, self._broken[name])

    async def _end(self) -> None:
        try:
            await Calls.end(self._calls.values())
        finally:
            self._places.give_back()

    @property
    def place_s(self) -> float | None:
        """Return the seconds for which the conversation waited for places (`places.py`); None: it needs none."""
        return self._places.waited_s

    def _calls_of(self, gate: Gate) -> Calls:
        given, kwargs = self._given.get(gate.name, {}), {}
        for method in METHODS:
            bound = bind_kwargs(gate.owner.made, method, given.get(f"{method}_kwargs", {}), self._request_id)
            kwargs[method] = copy_kwargs(bound, gate.name, method, self._request_id)
        wants_data = kwargs["execute"].get("agent_data", self) is None
        uncopied = {"execute": {"agent_data": self._agent_data}} if wants_data else {}
        return Calls(gate, self._request_id, kwargs, uncopied)

    async def execute(self, calls: Sequence[ToolCall | MalformedCall]) -> list[CallResult]:
        """Run the calls of one turn in parallel, and return one result for each, in the calls' order.

        Raises:
            ToolContractError: A tool returned something that is not a tool result, or the session has ended.
        """
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

        Then the conversation is lost that is `shut_out`.

        Omitted: a tool whose `create` failed, whose `calc_reward` raised or was late, or whose reward is unusable. One
        that raised `UnjudgedError` is named in `unjudged`; after an outage the conversation is lost.

        Raises:
            ToolContractError: A tool that derives from `BaseTool` returned a reward that is not a number.
        """
        rewards: dict[str, float] = {}
        for name, gate in self._gates.items():
            if name in self._broken:
                continue
            if "calc_reward" in gate.owner.inherited:
                rewards[name] = 0.0
                continue
            watched = gate.watched(self._request_id, "calc_reward", self._written(gate))
            try:
                async with watched:
                    await watched.wait()
                    value = await self._judged(name)
            except Exception as error:  # a tool's own code: log it, the conversation stays valid but after an outage
                logger.warning("tool %r: calc_reward raised %s", name, describe(error))
                self._note(watched, error)
                continue
            if isinstance(value, UnjudgedError):
                logger.warning("tool %r: calc_reward cannot judge: %s", name, message_of(value))
                self.unjudged = f"tool {name!r}: {message_of(value)}"
            elif (reward := read_reward(name, "calc_reward", value, gate.is_foreign)) is not None:
                rewards[name] = reward
        self._lost = self._lost or self.shut_out
        return rewards

    async def _judged(self, name: str) -> Any:
        """Return `calc_reward`'s result, or the error that it raises when it cannot judge: that is not a failure."""
        try:
            return await self._calls[name].call("calc_reward")
        except UnjudgedError as error:
            return error

    async def _create(self, gate: Gate) -> None:
        name, calls = gate.name, self._calls[gate.name]
        watched = gate.watched(self._request_id, "create", self._written(gate))
        await watched.wait()
        calls.begin()
        try:
            async with watched:
                created = await calls.call("create")
        except Exception as error:  # a tool's own code: the model reads it at each call of the tool
            self._broken[name] = describe(error)
            logger.warning("tool %r: create raised %s", name, self._broken[name])
            self._note(watched, error)
            return
        # verl 0.4's tools return the id, verl 0.9's the id and a response; ours return None.
        given = created[0] if isinstance(created, tuple) and created else created
        if given is not None:
            if not isinstance(given, str):
                raise ToolContractError(
                    f"tool {name!r}: create must return None or an instance id, got {show(created)}"
                )
            calls.instance_id = given

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
        gate = self._shown.get(call.name)
        if gate is None:
            known = ", ".join(self._shown) or "none"
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
        outage ─it has lasted for `stop_s`─────────→ raised
          ↓
        slot ───none in time───────────────────────→ OVERLOADED
          ↓
        execute, again while it fails and may be repeated
          ├─ returned → read_answer → cache ───────→ OK
          ├─ late ─────────────────────────────────→ TIMEOUT
          ├─ raised ───────────────────────────────→ ERROR
          └─ broke its contract, or we are cancelled: raised
        and in any case the slot is given back, when the call's tasks and threads have ended
        """
        key = None
        if gate.limits.cache:
            row = self._calls[gate.name].kwargs
            key = gate.cache_key(arguments, [row["create"], row["execute"]])
            if (known := gate.cached(key, call.id)) is not None:
                return known
        self._arguments.append(call.arguments)
        watched = gate.watched(self._request_id, "execute", self._written(gate))
        self._called[watched.name] += 1
        most = gate.limits.response_characters
        while True:
            result, slot = CallResult(call.id, gate.name), Slot(gate)
            try:
                async with watched:
                    with slot:
                        await watched.take(slot.take, slot.give_back)
                        returned = await self._execute(gate, result, slot, arguments)
                        read_answer(result, returned, most, gate.is_foreign)
            except (ToolContractError, OutageEndError):
                raise
            except asyncio.CancelledError as error:
                self._note(watched, error)
                raise
            except Exception as error:  # a tool's own code, or an obstacle to it: for the model to read
                if watched.again:
                    continue
                self._note(watched, error)
                self._failed[watched.name] += watched.met
                self._refused[watched.name] += isinstance(error, BusyError) and not watched.met
                read_failure(result, error, gate.timeout_s, most)
            else:
                result.cached = result.attempts == 0  # in a recorded conversation
                if key is not None:
                    gate.remember(key, result)
            result.at, result.queue_s = time.time(), slot.started - slot.asked
            result.seconds = slot.ended - slot.started if result.attempts else 0.0
            return result

    def _written(self, gate: Gate) -> WrittenTexts:
        return WrittenTexts(self._arguments, list(self._calls[gate.name].kwargs.values()))

    def _note(self, watched: GuardedCall, error: BaseException) -> None:
        """Note the outage that a call hit."""
        if watched.met:
            self.outages[watched.name] = None
        if watched.ends:
            self._lost = f"{watched.name}: {describe(error)}"

    async def _execute(self, gate: Gate, result: CallResult, slot: Slot, arguments: dict[str, Any]) -> Any:
        """Call `execute`, again while it fails and may be repeated within the call's time, and return its result.

        The result counts the attempts.

        Raises:
            TimedOutError: The tool did not answer in time.
            Exception: The tool raised it, in its last attempt.
        """
        loop = asyncio.get_running_loop()
        until = slot.started + gate.timeout_s
        is_repeated = gate.limits.retries > 0 or gate.owner.roles["execute"] == "repeatable"
        while True:
            result.attempts += 1
            alarms = None if result.attempts == 1 else Alarms(until - loop.time())
            given = copy.deepcopy(arguments) if is_repeated else arguments
            try:
                return await self._calls[gate.name].call("execute", given, slot=slot, alarms=alarms)
            except (TimedOutError, ToolContractError, ValueError):
                raise
            except Exception as error:  # a tool's own code
                wait_s = next_try_s(error)
                if wait_s is None:
                    wait_s = BACKOFF_S * 2 ** (result.attempts - 1) * random.uniform(0.5, 1)
                if result.attempts > gate.limits.retries or loop.time() + wait_s >= until:
                    raise
            await asyncio.sleep(wait_s)
