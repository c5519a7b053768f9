"""`paths_of`: which of a task's ways a conversation took: no tool, one of the tools, or an unreadable call.

Invariant: of no tool, some tool and a malformed call a conversation took exactly one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl_multiturn.tools.running.results import CallStatus

NO_TOOL, MALFORMED = "no tool", "malformed"
_UNREADABLE = frozenset({CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS})


class Paths(NamedTuple):
    """The ways that a conversation had, and those that it took."""

    offered: tuple[str, ...] = ()
    """Names of the tools that it could call, sorted."""
    called: tuple[str, ...] = ()
    """Names of the tools that it called, in a call that the tool can be given, sorted. A tool's failure counts."""
    malformed: bool = False
    """Whether it wrote a call that cannot be read, of an unknown tool, or with arguments that do not fit."""

    @property
    def taken(self) -> tuple[str, ...]:
        """The ways that it took: the tools that it called; else `MALFORMED` or `NO_TOOL`."""
        return self.called or ((MALFORMED,) if self.malformed else (NO_TOOL,))


def paths_of(record: Mapping[str, Any]) -> Paths:
    """Return the ways of a recorded conversation.

    An agent behind the endpoint runs its tools itself. It is known which tools it offered the model, and which of them
    the model called, but not whether the arguments fit.

    Args:
        record: The conversation, as `schema.Record`.
    """
    if (session := record["session"]) is not None:
        offered = {_name(tool) for request in session["requests"] for tool in _listed(request["tools"])}
        called = {_name(call) for message in _messages(record) for call in _listed(message.get("tool_calls"))}
        return Paths(_sorted(offered), _sorted(called & offered), bool(called - offered))
    unreadable = [call["status"] in _UNREADABLE for call in record["calls"]]
    read = {call["tool"] or call["name"] for call, bad in zip(record["calls"], unreadable, strict=True) if not bad}
    return Paths(_sorted(record["sample"]["tools"]), _sorted(read), any(unreadable))


def _messages(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for request in record["session"]["requests"]:
        yield from request["messages"]
    yield from record["messages"]


def _name(entry: Mapping[str, Any]) -> str:
    """Return the name in a schema, or in a call, in the form of chat completions; "" where it has none."""
    function = entry.get("function")
    return str((function if isinstance(function, Mapping) else entry).get("name") or "")


def _listed(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list; of anything else, such as the number of another request's list, none."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if name}))
