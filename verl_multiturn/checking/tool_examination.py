"""Checks of `contract`, one method for each."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.checking.addresses import address_parameters
from verl_multiturn.checking.advice import CLASS, FUNCTION
from verl_multiturn.checking.examination import AT_ONCE, Examination, Grade, Timed
from verl_multiturn.checking.instruments import ExaminationWatch
from verl_multiturn.checking.isolation import Isolation
from verl_multiturn.checking.method_calls import ProbeResult
from verl_multiturn.checking.other_rows import Kwargs
from verl_multiturn.checking.server_state import ServerState
from verl_multiturn.checking.trial_calls import (
    ToolProbe,
    as_call,
    bad_arguments,
    example_arguments,
    is_result,
    own_id,
    text_of,
)
from verl_multiturn.describe import message_of, place_of_function, show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.rows.reward_numbers import USABLE
from verl_multiturn.tools.base import is_foreign
from verl_multiturn.tools.loading.functions import FunctionTool
from verl_multiturn.tools.running.answers import read_reward

_SERVERS_AT_ONCE = 8
_LONG_ANSWER = 20_000
_LONG_ERROR = 2_000


class ToolExamination(Examination):
    """All checks of one tool.

    Args:
        probe: The tool.
        watch: As in `Examination`.
        temporary: As in `Examination`.
        arguments: Arguments of an example call; None to guess them.
        other: Another row's kwargs; None to make them.
    """

    def __init__(
        self,
        probe: ToolProbe,
        watch: ExaminationWatch,
        temporary: Path,
        arguments: Mapping[str, Any] | None,
        other: Kwargs | None = None,
    ) -> None:
        super().__init__(probe, watch, temporary, FUNCTION if isinstance(probe.tool, FunctionTool) else CLASS)
        self._probe = probe
        self._other = other
        self._guessed = arguments is None
        parameters = probe.schema.function.parameters
        self._arguments = dict(example_arguments(parameters) if arguments is None else arguments)

    async def first(self) -> bool:
        """Check the schema, the arguments of the example, and one conversation; return whether to go on."""
        self._schema()
        return self._example() and await self._lifecycle()

    def checks(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        """Return the other checks by name."""
        return {
            "event loop": self.event_loop,
            "leftovers": self.leftovers,
            "release after a failed create": self.end_after_a_failed_begin,
            "isolation": self._isolation,
            "given data": self._given_data,
            "concurrency": self._concurrency,
            "cancel create": functools.partial(self.cancel, method="create"),
            "cancel execute": functools.partial(self.cancel, method="execute"),
            "cancel release": functools.partial(self.cancel, method="release"),
            "bad arguments": self._bad_arguments,
        }

    async def converse(self, timed: Timed) -> None:
        """Run one conversation with one call."""
        probe, given = self._probe, uuid.uuid4().hex
        created = await timed("create", probe.call("create", given))
        self.last_id = own_id(created.value, given)
        await timed("execute", probe.call("execute", self.last_id, dict(self._arguments)))
        await probe.call("calc_reward", self.last_id)
        await timed("release", probe.call("release", self.last_id))

    async def end(self) -> None:
        """Close the tool."""
        if hasattr(self._probe.tool, "aclose"):
            await self._probe.tool.aclose()
        if self._probe.world is not None:
            await self._probe.world.aclose()

    def arguments_of(self, method: str) -> tuple[Any, ...]:
        """Return the arguments of the example for `execute`.

        Args:
            method: Name of the method.
        """
        return (dict(self._arguments),) if method == "execute" else ()

    def id_of(self, begun: Any, given: str) -> str:
        """Return the id that a tool of older verl gave, or the given one.

        Args:
            begun: The result of `create`.
            given: The id that it was given.
        """
        return own_id(begun, given)

    def _schema(self) -> None:
        function = self._probe.schema.function
        properties = function.parameters.get("properties", {})
        unknown = [name for name in function.parameters.get("required", []) if name not in properties]
        if unknown:
            found = f"requires {unknown[0]!r}, which is no property"
            self.note("schema", Grade.PROBLEM, found, self.advice["schema"])
        else:
            self.note("schema", Grade.OK, f"{len(properties)} arguments")
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.name):
            self.note("name", Grade.OK, function.name)
        else:
            self.note("name", Grade.WARNING, f"{function.name!r} is refused by OpenAI's API", self.advice["name"])
        silent = [name for name, of in properties.items() if not _is_described(of)]
        missing = ([] if function.description else ["the tool"]) + silent
        if missing:
            found = f"none of {', '.join(missing)}"
            of_server = hasattr(self._probe.tool, "siblings")  # a tool of an MCP server, whose entry has no tool_schema
            advice = self.advice["descriptions of a server" if of_server else "descriptions"]
            self.note("descriptions", Grade.WARNING, found, advice)
        else:
            self.note("descriptions", Grade.OK, "all there")
        rules, chosen = self._probe.outage, address_parameters(function.parameters)
        if chosen and rules.addresses is None and rules.mode != "off":
            found = f"{', '.join(map(repr, chosen))} may be an address, and limits.outage.addresses does not say whose"
            self.note("addresses", Grade.WARNING, found, self.advice["addresses"])

    def _example(self) -> bool:
        read, problem = self._probe.schema.read_arguments(as_call(self._arguments))
        if read is None:
            remedy = self.advice["example"] if self._guessed else "give arguments that fit the schema"
            self.note("example", Grade.PROBLEM, f"{self._arguments}: {problem}", remedy)
        return read is not None

    async def _lifecycle(self) -> bool:
        """Run the first conversation, and return whether more of them are of use."""
        probe = self._probe
        given = uuid.uuid4().hex
        instance_id, created = await probe.begin(given)
        problem = created.failure()
        if not problem and own_id(created.value, "") == "" and created.value is not None:
            problem = f"returned {show(created.value, 100)}{place_of_function(probe.tool.create)}"
        self.judge("create", problem, self._advice("create", created, given))
        if problem:
            await probe.call("release", instance_id)
            return False
        executed = await probe.call("execute", instance_id, dict(self._arguments))
        problem = executed.failure() or ("" if executed.error else is_result(probe.tool, executed))
        if problem and executed.error is None:
            problem += place_of_function(probe.tool.execute)
        if isinstance(executed.error, ValueError) and self._guessed:
            found = f"refused the guessed arguments {self._arguments}: {message_of(executed.error)}"
            self.note("execute", Grade.WARNING, found, self.advice["guess"])
            problem = ""
        else:
            self.judge("execute", problem, self._advice("execute", executed, instance_id))
        reward_problem = self._reward(await probe.call("calc_reward", instance_id), instance_id)
        released = await probe.call("release", instance_id)
        self.judge("release", released.failure(), self.advice["late" if released.timed_out else "release"])
        return not problem and not reward_problem and released.error is None

    def _advice(self, method: str, outcome: ProbeResult, instance_id: str) -> str:
        """Return the advice for a method; where it does not find its conversation, also how to give it a world."""
        if outcome.cause == "outage":
            return self.advice["outage"]
        if outcome.timed_out:
            return self.advice["late"]
        lost = isinstance(outcome.error, LookupError) and instance_id in message_of(outcome.error)
        if lost and self._probe.world is None:
            return self.advice["world"]
        return self.advice[f"{method} raised" if outcome.error is not None else method]

    def _reward(self, rewarded: ProbeResult, instance_id: str) -> str:
        """Check `calc_reward`, and return its fault; for another agent loop's tool a wrong reward is a warning."""
        tool = self._probe.tool
        problem, foreign = rewarded.failure(), is_foreign(tool)
        if not problem:
            try:
                if read_reward(tool.name, "calc_reward", rewarded.value, foreign) is None:
                    problem = f"the reward must be a {USABLE}, got {show(rewarded.value)}"
            except ToolContractError as error:
                problem = str(error)
        if problem and foreign and rewarded.error is None:
            self.note("calc_reward", Grade.WARNING, f"{problem}; it is left out", self.advice["calc_reward"])
            return ""
        self.judge("calc_reward", problem, self._advice("calc_reward", rewarded, instance_id))
        return problem

    async def _isolation(self, check: str) -> None:
        """Compare two conversations at once with each of them alone, and look for words of one in the other."""
        advice = self.advice[check]
        if hasattr(self._probe.tool, "siblings"):  # a tool of an MCP server
            advice = self.advice[f"state per {self._probe.tool.server.settings.per}"]
            if seen := await ServerState(self._probe, self._arguments).run():
                self.note(check, Grade.PROBLEM, seen, advice)
                return
        grade, found = await Isolation(self._probe, self._arguments, self._other).run()
        self.note(check, grade, found, advice if grade in (Grade.PROBLEM, Grade.WARNING) else "")

    async def _given_data(self, check: str) -> None:
        """Check whether a conversation changes its row's kwargs or a call's arguments."""
        probe = self._probe
        given: list[tuple[str, Any, str]] = []
        probe.given = given
        await probe.converse([self._arguments] * 2)
        probe.given = None
        changed = list(dict.fromkeys(method for method, data, before in given if repr(data) != before))
        if not changed:
            self.note(check, Grade.OK, "left as it was")
            return
        found = f"what {' and '.join(changed)} was given has changed by the end of the conversation"
        self.note(check, Grade.WARNING, found, self.advice[check])

    async def _concurrency(self, check: str) -> None:
        """Run many conversations that have all begun before the first one ends."""
        probe = self._probe
        places = getattr(probe.tool, "places", None)  # each conversation starts a process then
        count = AT_ONCE if places is None else min(_SERVERS_AT_ONCE, places.settings.most)
        loop = asyncio.get_running_loop()
        started = loop.time()
        begun = await asyncio.gather(*(probe.begin() for _ in range(count)))
        called = await asyncio.gather(*(probe.call("execute", given, dict(self._arguments)) for given, _ in begun))
        ended = await asyncio.gather(*(probe.call("release", given) for given, _ in begun))
        seconds = loop.time() - started
        for method, outcomes in (("create", [of for _, of in begun]), ("execute", called), ("release", ended)):
            failed = [outcome for outcome in outcomes if outcome.failure(refusals=False)]
            if failed:
                first = failed[0].failure(refusals=False)
                found = f"{method} failed in {len(failed)} of {count} conversations at once: {first}"
                advice = self.advice["outage" if failed[0].cause == "outage" else "seats"]
                self.note(check, Grade.PROBLEM, found, advice)
                return
        one = self.seconds["execute"]
        if places is None and one > 0.02 and seconds > count / 2 * one:
            found = f"{count} conversations took {seconds:.1f} s, one call takes {one:.2f} s"
            self.note(check, Grade.WARNING, found, self.advice[check])
        else:
            self.note(check, Grade.OK, f"{count} at once in {seconds:.2f} s")

    async def _bad_arguments(self, check: str) -> None:
        probe, name = self._probe, self._probe.tool.name
        parameters = probe.schema.function.parameters
        passed: dict[str, dict[str, Any]] = {}
        cases = bad_arguments(parameters, self._arguments)
        for case, arguments in cases.items():
            read, _ = probe.schema.read_arguments(as_call(arguments))
            if read is not None:
                passed[case] = read
        instance_id, _ = await probe.begin()
        outcomes = await asyncio.gather(*(probe.call("execute", instance_id, given) for given in passed.values()))
        await probe.call("release", instance_id)
        problems, long = [], []
        for case, outcome in zip(passed, outcomes, strict=True):
            failure = outcome.failure(refusals=False) or ("" if outcome.error else is_result(probe.tool, outcome))
            if failure:
                problems.append(f"{case}: {failure}")
            elif len(text := text_of(outcome, name)) > (_LONG_ERROR if outcome.error else _LONG_ANSWER):
                long.append(f"{case}: {len(text)} characters")
        tried = f"{len(cases)} tried, {len(passed)} of them called"
        self.judge(check, "; ".join(problems[:4]), self.advice[check], tried)
        if long:
            self.note("answer size", Grade.WARNING, "; ".join(long[:3]), self.advice["answer size"])
        else:
            self.note("answer size", Grade.OK, "")


def _is_described(schema: Any) -> bool:
    """Return whether a schema has a description, or one of its alternatives."""
    if not isinstance(schema, Mapping):
        return False
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in schema.get(key, ())]
    return bool(schema.get("description")) or any(map(_is_described, options))
