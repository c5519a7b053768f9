"""The check of the state of a tool server that conversations share: does one conversation see another one's?

Two looks, of which neither accuses a server whose answers are random or change with the time:

- each string that a conversation writes holds a word of its own, and no answer in another conversation may hold it;
- with one server for all conversations: servers that are started anew answer their first conversation alike, each time,
  and their second one alike, too, but otherwise than the first.

Invariant: all tools of the server take part, since one tool may write what another one reads.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.checking.trial_calls import ToolProbe, as_call, example_arguments, text_of
from verl_multiturn.errors import ConfigError

_WORD = "example"
"""The word that guessed arguments hold, and that one's own may hold: each conversation has another in its place."""
_MOST_TOOLS = 24
_CALLS = 2
_SERVERS = 3
"""Servers that are started for a comparison, and once more where they show a difference."""
_Answers = dict[str, list[str]]


@dataclass(frozen=True)
class StateLeak:
    """One way in which a conversation sees another one's.

    Attributes:
        tools: Names of the tools that show it.
        found: The finding, in words.
    """

    tools: frozenset[str]
    found: str


class ServerState:
    """The check of the server of one tool.

    Args:
        probe: The tool, whose `siblings` are all tools of its server.
        arguments: Arguments of an example call of the tool; those of its siblings are guessed.
    """

    def __init__(self, probe: ToolProbe, arguments: Mapping[str, Any]) -> None:
        tool = probe.tool
        others = [other for other in tool.siblings if other is not tool]
        self._timeout_s = probe.timeout_s
        self._tools = [tool, *others[: _MOST_TOOLS - 1]]
        self._arguments = {
            each.name: dict(arguments) if each is tool else example_arguments(each.tool_schema.function.parameters)
            for each in self._tools
        }
        self._server = tool.server
        self._name = tool.name

    async def run(self) -> str:
        """Return how a conversation that calls the tool sees another one, or shows itself to one; "" for no way."""
        leaks = await self._words()
        if not any(self._name in leak.tools for leak in leaks) and self._server.settings.per == "worker":
            leaks = await self._differences()
        return next((leak.found for leak in leaks if self._name in leak.tools), "")

    async def _words(self) -> list[StateLeak]:
        """Look for words that one conversation wrote in the answers to another one."""
        words = [{name: f"word{uuid.uuid4().hex[:12]}" for name in self._arguments} for _ in range(2)]
        given = [{name: self._marked(name, word) for name, word in own.items()} for own in words]
        if self._server.settings.per == "worker":
            _, answers = [await self._converse(self._tools, own, 1) for own in given]
        else:
            try:
                answers = await self._started_between(given)
            except ConfigError:  # it does not start a second time, which other checks report
                return []
        return [
            StateLeak(
                frozenset({reader, writer}),
                f"{reader!r} answers a conversation with what another one gave {writer!r}: {_around(said, word)!r}",
            )
            for reader, texts in answers.items()
            for said in texts
            for writer, word in words[0].items()
            if word in said
        ]

    def _marked(self, name: str, word: str) -> dict[str, Any]:
        """Return the arguments of a tool with a word of its own in each string, as far as its schema takes them."""
        schema = next(each for each in self._tools if each.name == name).tool_schema
        marked = _replaced(self._arguments[name], word)
        return marked if schema.read_arguments(as_call(marked))[0] is not None else self._arguments[name]

    async def _differences(self) -> list[StateLeak]:
        """Compare the second conversation of servers that were started anew with their first one."""
        found: list[StateLeak] = []
        for _ in range(2):
            try:
                runs = [await self._anew() for _ in range(_SERVERS)]
            except ConfigError:  # it does not start a second time, which other checks report
                return []
            found = [
                StateLeak(
                    frozenset({name}),
                    f"a server that was started anew answers {name!r} with {runs[0][0][name]!r:.100}, and the same "
                    f"calls of the next conversation with {runs[0][1][name]!r:.100}",
                )
                for name in self._arguments
                if all(first[name] == runs[0][0][name] and second[name] == runs[0][1][name] for first, second in runs)
                and runs[0][0][name] != runs[0][1][name]
            ]
            if not found:
                break
        return found

    async def _started_between(self, given: Sequence[Mapping[str, dict[str, Any]]]) -> _Answers:
        """Return the answers to a conversation whose server was started after another one's: it may read its file."""
        server = await asyncio.to_thread(self._server.another)
        try:
            tools = [type(tool)(server, tool.remote_name, tool.tool_schema) for tool in self._tools]
            _, answers = [await self._converse(tools, own, 1) for own in given]
            return answers
        finally:
            await server.aclose()

    async def _anew(self) -> tuple[_Answers, _Answers]:
        """Start a server, and return its answers to two conversations, one after the other."""
        server = await asyncio.to_thread(self._server.another)
        try:
            tools = [type(tool)(server, tool.remote_name, tool.tool_schema) for tool in self._tools]
            first = await self._converse(tools, self._arguments, _CALLS)
            return first, await self._converse(tools, self._arguments, _CALLS)
        finally:
            await server.aclose()

    async def _converse(self, tools: Sequence[Any], arguments: Mapping[str, dict[str, Any]], calls: int) -> _Answers:
        """Call all tools in one conversation, and return their answers by name."""
        probes = [ToolProbe(tool, {}, self._timeout_s) for tool in tools]
        conversation = uuid.uuid4().hex
        for probe in probes:
            await probe.call("create", conversation)
        answers: _Answers = {}
        for probe in probes:
            outcomes = [
                await probe.call("execute", conversation, dict(arguments[probe.tool.name])) for _ in range(calls)
            ]
            answers[probe.tool.name] = [text_of(outcome, probe.tool.name) for outcome in outcomes]
        for probe in probes:
            await probe.call("release", conversation)
        return answers


def _replaced(value: Any, word: str) -> Any:
    """Return a value in which each string holds a word: in the place of `_WORD`, or of all of it."""
    if isinstance(value, str):
        return value.replace(_WORD, word) if _WORD in value else word
    if isinstance(value, Mapping):
        return {key: _replaced(item, word) for key, item in value.items()}
    return [_replaced(item, word) for item in value] if isinstance(value, list) else value


def _around(text: str, word: str) -> str:
    at = text.index(word)
    return text[max(0, at - 30) : at + len(word) + 30]
