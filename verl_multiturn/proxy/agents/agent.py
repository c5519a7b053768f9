"""An agent that is a function: its form, and how it is called.

The form of `module:name` is read from the signature of the named object:

| signature | called as | form |
|---|---|---|
| `f(row, session)` | `f(row, session)`, with a `SessionAddress` | ours |
| `run(data, base_url=…, api_key=…)`, also `run(data, **kwargs)` | with those of the two that it takes | AReaL's, since 1.0 |
| `run_agent_return_reward(data)`, and any other function of one argument | `f(row)`; the address is in the environment | AReaL's, before |

Each may be synchronous or asynchronous. A class is made anew for each session, without arguments; its `run` is the
function, or the instance itself where it has none. An agent of the last form reads `OPENAI_BASE_URL` and the like, so
it needs a process of its own.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.chat.messages import plain as without_nulls
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FORMS = "f(row, session), run(data, base_url=…, api_key=…) or run_agent_return_reward(data)"


@dataclass(frozen=True)
class SessionAddress:
    """Where an agent finds the model: the second argument of `f(row, session)`."""

    base_url: str
    """Address for clients of OpenAI's protocols, ending in `/v1`."""
    api_key: str = field(repr=False)
    """The session's secret."""
    anthropic_base_url: str
    """Address for clients of Anthropic's protocol."""
    id: str
    """The session's id, unique in the run."""
    deadline: float | None = None
    """When the session's time is up, as `time.monotonic()` counts it; None: no limit.

    Time in which the weights are updated does not count, so the end may come later.
    """


@dataclass(frozen=True)
class Agent:
    """A function that is an agent.

    Attributes:
        name: Its name, `module:name`.
        form: How it is called: as `f(row, session)`, with the address as keywords, or with the row alone.
        keywords: Which of `base_url` and `api_key` it takes, in the form `keywords`.
    """

    name: str
    form: Literal["session", "keywords", "row"]
    keywords: tuple[str, ...]
    _make: Callable[[], Callable[..., Any]]

    @property
    def takes_address(self) -> bool:
        """Whether the address is one of its arguments."""
        return self.form != "row"

    @property
    def is_areals(self) -> bool:
        """Whether it was written for AReaL."""
        return self.form != "session"

    def call(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        returned: Callable[[Any], None],
        began: Callable[[asyncio.Task[Any]], None] | None = None,
    ) -> None:
        """Call the agent, in a thread without a running event loop.

        Args:
            row: The data row, as `agent_row` returns it.
            address: Where it finds the model.
            returned: Is called with the result, before the agent's remaining tasks are ended.
            began: Is called with the task of an asynchronous agent.
        """
        function = self._make()
        keywords = {name: getattr(address, name) for name in self.keywords}
        call: Callable[[], Any] = partial(function, row, **keywords)
        if self.form == "session":
            call = partial(function, row, address)
        try:
            # A loop only where it is needed: a synchronous agent may start one of its own.
            if not _is_asynchronous(function):
                result = call()
                if not inspect.isawaitable(result):
                    returned(result)
                    return
                call = partial(_itself, result)
            with asyncio.Runner() as runner:
                returned(runner.run(_awaited(call, began)))
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
            returned(None)  # a program around a command line ends so when all is well


def _itself(value: Any) -> Any:
    return value


async def _awaited(call: Callable[[], Any], began: Callable[[asyncio.Task[Any]], None] | None) -> Any:
    if began is not None and (task := asyncio.current_task()) is not None:
        began(task)
    return await call()


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def load_agent(name: str, where: str) -> Agent:
    """Import an agent and read its form.

    Args:
        name: `module:name`.
        where: The setting that errors name.

    Raises:
        ConfigError: It cannot be imported, or is nothing that can be called as an agent.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"{where}: {name!r} is no agent; write it as 'package.module:function'")
    found = resolve(f"{module}.{attribute}", where)
    if isinstance(found, type):
        needed = _needed(found)
        if needed:
            raise ConfigError(f"{where}: {name!r} is a class that needs {needed[0]!r}; give each argument a default")
        make = lambda: _function(found())  # noqa: E731
        function = found.__dict__.get("run") or getattr(found, "run", None) or found.__dict__.get("__call__")
        skip = 1
    else:
        make = lambda: _function(found)  # noqa: E731
        function, skip = _function(found), 0
    if not callable(function):
        raise ConfigError(f"{where}: {name!r} is {show(found, 100)}, expected a function or a class with run()")
    form, keywords = _form(function, skip, f"{where}: {name!r}")
    return Agent(name, form, keywords, make)


def _function(found: Any) -> Any:
    run = getattr(found, "run", None)
    return run if callable(run) and not inspect.isfunction(found) else found


def _needed(made: type) -> list[str]:
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:  # one that is not written in Python
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _form(
    function: Callable[..., Any], skip: int, where: str
) -> tuple[Literal["session", "keywords", "row"], tuple[str, ...]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        raise ConfigError(f"{where} has no signature that can be read; write it as {_FORMS}") from None
    by_name = {each.name: each for each in parameters}
    places = [each for each in parameters if each.kind in _POSITIONAL]
    is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    keywords = tuple(name for name in ("base_url", "api_key") if name in by_name or is_open)
    if not places:
        raise ConfigError(f"{where} takes no data row; write it as {_FORMS}")
    needed = [each.name for each in parameters[1:] if each.default is each.empty and _is_single(each)]
    second = places[1].name if len(places) > 1 else ""
    if (needed == [second] and second not in keywords) or (second == "session" and not needed):
        return "session", ()
    if "base_url" in keywords and set(needed) <= set(keywords):
        return "keywords", keywords
    if not needed:
        return "row", ()
    raise ConfigError(f"{where} needs the arguments {[places[0].name, *needed]}; write it as {_FORMS}")


def _is_single(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def agent_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a data row as an agent gets it: plain values, as JSON has them, the prompt under `messages`.

    The messages have no nulls, which Parquet puts where a row has nothing (see `chat.messages.plain`). Bytes, such as
    those of an image, are in base64.

    Raises:
        ConfigError: A column cannot be written as JSON.
    """
    columns = {str(name): value for name, value in row.items() if name != "raw_prompt"}
    if "raw_prompt" in row:
        columns.setdefault("messages", without_nulls(row["raw_prompt"]))
    plain: dict[str, Any] = {}
    for name, value in columns.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"column {name!r} of a data row is {show(value, 100)}, which JSON cannot hold ({error}); leave it out"
            ) from None
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # of NumPy or PyTorch
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain value")
