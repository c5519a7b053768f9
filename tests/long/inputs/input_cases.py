"""An input: its value, the door that it goes through, the right outcome, and the counted one."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from typer.testing import CliRunner

from verl_multiturn import MultiTurnError, OutageError, UnjudgedError, scripted_rollout
from verl_multiturn.cli.main import app
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.running.results import CallStatus

Kind = Literal["accepted", "refused", "model", "outage", "invalid"]
"""`model`: the model reads about it; `outage`: it is not trained on; `invalid`: the conversation is dropped."""
Count = Literal["right", "silent", "tracebacks", "wrong_status", "unnamed"]
"""`silent`: accepted where it must not be, with another value, or counted as the model's; `unnamed`: the sentence does
not name the error, or it shows a password.
"""
PASSWORD = "secret"
"""The password in each address that has one; no sentence may show it."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}|<_?ast\b|<ast\.| object at ")


@dataclass(frozen=True)
class Seen:
    """Result of an input.

    Attributes:
        kind: The way in which it ended.
        value: The accepted value.
        sentence: The message.
        status: Exit status, where a command was run.
    """

    kind: Kind
    value: Any = None
    sentence: str = ""
    status: int | None = None


@dataclass(frozen=True)
class Right:
    """The right result: a kind, and the value, the words of the sentence or the exit status."""

    kind: Kind
    value: Any = None
    words: Sequence[str] = ()
    status: int | None = None


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        subject: One of `SUBJECTS` in `inputs.py`.
        given: The input in a few words.
        door: The part that takes it.
        right: Its right outcome.
        is_slow: Whether it takes more than a moment, so that the short form leaves it out.
    """

    subject: str
    given: str
    door: Callable[[], Awaitable[Seen]]
    right: Right
    is_slow: bool = False


@dataclass(frozen=True)
class Tried:
    """An input and its counts."""

    case: Case
    seen: Seen
    counted: Count


def accept(value: Any = None, status: int | None = None) -> Right:
    """State that an input is right, and which value arrives."""
    return Right("accepted", value, status=status)


def refuse(*words: str, status: int | None = None) -> Right:
    """State that an input is refused, by a sentence with these words."""
    return Right("refused", words=words, status=status)


def models(*words: str) -> Right:
    """State that the model reads about it, with these words."""
    return Right("model", words=words)


def outage(*words: str) -> Right:
    """State that it is an outage, whose sentence has these words."""
    return Right("outage", words=words)


async def try_case(case: Case) -> Tried:
    """Put an input through its door, and count its outcome."""
    shown = StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            seen = await case.door()
    except MultiTurnError as error:
        seen = Seen(kind_of(error), sentence=str(error))
    except (Exception, SystemExit) as error:  # any other result is counted
        seen = Seen("refused", sentence="".join(traceback.format_exception_only(error)).strip())
        return Tried(case, seen, "tracebacks")
    if "Traceback (most recent call last)" in seen.sentence + shown.getvalue():
        return Tried(case, seen, "tracebacks")
    return Tried(case, seen, count(seen, case.right))


def kind_of(error: MultiTurnError) -> Kind:
    """Return an input's outcome by an error of this package."""
    return "outage" if isinstance(error, OutageError) else "invalid" if isinstance(error, UnjudgedError) else "refused"


def count(seen: Seen, right: Right) -> Count:
    """Return the counts of an input.

    Args:
        seen: Its outcome.
        right: The right outcome.
    """
    if seen.kind != right.kind:
        return "silent" if seen.kind in ("accepted", "model") else "wrong_status"
    if seen.status is not None and seen.status != (_STATUS[right.kind] if right.status is None else right.status):
        return "wrong_status"
    if right.kind == "accepted" and right.value is not None and not same(seen.value, right.value):
        return "silent"
    if right.kind == "model" and _ADDRESS.search(seen.sentence):
        return "silent"
    is_named = all(word in seen.sentence for word in right.words) and PASSWORD not in seen.sentence
    return "right" if is_named else "unnamed"


_STATUS: dict[Kind, int] = {"accepted": 0, "refused": 2, "model": 0, "outage": 2, "invalid": 2}


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same, their types included."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def command(*words: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a command of `verl-multiturn`, in this process."""

    async def door() -> Seen:
        # In a thread: the command may run an event loop of its own, and servers of the case run on this one.
        import asyncio

        return await asyncio.to_thread(run_command, *words)

    return door


def run_command(*words: str) -> Seen:
    """Run a command of `verl-multiturn` in this process."""
    result = CliRunner().invoke(app, [*words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    kind: Kind = "refused" if result.exit_code else "accepted"
    return Seen(kind, sentence=result.output, status=result.exit_code)


def call(
    tool: Any, arguments: Mapping[str, Any], row: Mapping[str, Any] | None = None
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of one call of a tool, in a scripted conversation: the value is the answer and its reward."""

    async def door() -> Seen:
        made = tool if hasattr(tool, "tool_schema") else function_tool(tool)
        outcome = await scripted_rollout(
            [made], [tool_call(made.name, dict(arguments)), "done"], "go", tools_kwargs={made.name: dict(row or {})}
        )
        result = outcome.calls[0]
        if result.status is CallStatus.OK:
            return Seen("accepted", (result.text, result.reward), result.text)
        return Seen("model", sentence=result.text)

    return door


def schema(function: Any, *path: str) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a typed function's schema: the value is the one at a path in its parameters."""

    async def door() -> Seen:
        found: Any = function_tool(function).tool_schema.function.parameters
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return Seen("accepted", found, json.dumps(found))

    return door
