"""`require_rewards`: a reward function that returns rewards, or names its mistake: function, row and value.

`load_route` and `call_problem` find a function that could not be called, before the first conversation.

    verl's reward manager ─▶ checked function ─▶ the author's function
                                  └─ a result that is not a reward, ConfigError: RewardContractError, which ends the run

It serves each caller of a reward function of any kind, the author's own in the place of `compute_score` too.

Invariants:
- the result has a score that `reward_numbers.score_of` takes; it is the function's own, unchanged;
- `UnjudgedError`, `OutageError` and whatever else the function raises pass through.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.describe import describe, message_of, place_of, show, unbound
from verl_multiturn.errors import ConfigError, RewardContractError
from verl_multiturn.rows.reward_numbers import NoNumberError, UnusableNumberError, score_of

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keywords with which verl's reward managers call a reward function."""
GROUP = "rewards"
"""Group of the entry points that a route may name."""
_MARK = "__verl_multiturn_reward__"
"""Attribute of an error that a reward function raised: its place, the function and the row, as texts."""
_LONGEST = 200
"""Characters of a ground truth that a message shows."""


def load_route(name: str, where: str) -> Callable[..., Any]:
    """Import the function that a route names, and return it.

    Args:
        name: Its dotted name, or its reference `package/name`.
        where: The setting of the route, for errors.

    Raises:
        ConfigError: It cannot be imported, is no function, or cannot be called with a solution and a ground truth.
    """
    function = resolve(name, where, GROUP)
    last = name.replace("/", ".").rpartition(".")[2]
    remedy = f"write it as def {last}(solution, ground_truth)"
    if not callable(function):
        raise ConfigError(f"{where}: expected a function, but {name!r} is {show(function, 100)}; {remedy}")
    parameters = _signature_of(function)
    if parameters is not None and (problem := unbound(parameters, (None, None), {})):
        raise ConfigError(f"{where}: {name!r} cannot be called with (solution, ground_truth): {problem}; {remedy}")
    found: Callable[..., Any] = function
    return found


def call_problem(function: Callable[..., Any], options: Iterable[str] = ()) -> str:
    """Return why verl cannot call a reward function in the place of `compute_score`, and the remedy; "" where it can.

    Args:
        function: The author's function.
        options: Names of its own keywords, from `reward_kwargs`.
    """
    if (parameters := _signature_of(function)) is None:
        return ""
    if not (problem := unbound(parameters, (), dict.fromkeys([*KEYWORDS, *options]))):
        return ""
    return (
        f"the reward function {name_of(function)} cannot be called as verl calls it, with "
        f"{', '.join(f'{name}=…' for name in KEYWORDS)}: {problem}; write it as def "
        f"compute_score({', '.join(KEYWORDS)}, **kwargs)"
    )


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        # A decorator may take keywords that the function within it does not.
        return inspect.signature(function, follow_wrapped=False)
    except Exception:  # a builtin does not show its parameters, and an author's object may refuse in any way
        return None


def require_rewards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function whose results are rewards, a coroutine function where it is one.

    Args:
        function: It takes verl's arguments by name: `data_source`, `solution_str`, `ground_truth`, `extra_info`.

    The function that is returned raises `RewardContractError` for a result that is not a reward, and in the place of a
    `ConfigError`.
    """
    if getattr(function, "is_checked", False):
        return function
    named = name_of(function)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def judge(*args: Any, **kwargs: Any) -> Any:
            try:
                result = await function(*args, **kwargs)
            except ConfigError as error:
                raise RewardContractError(f"{row_name(kwargs)}: {message_of(error)}") from error
            except Exception as error:  # an author's function may raise anything
                _mark(error, function, kwargs)
                raise
            return _read(result, named, kwargs)

    else:

        @functools.wraps(function)
        def judge(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except ConfigError as error:
                raise RewardContractError(f"{row_name(kwargs)}: {message_of(error)}") from error
            except Exception as error:  # an author's function may raise anything
                _mark(error, function, kwargs)
                raise
            return _read(result, named, kwargs)

    judge.is_checked = True  # type: ignore[attr-defined]  # managers may share a function
    return judge


def raised_text(error: BaseException, has_row: bool = True) -> str:
    """Return what a conversation raised, for messages: type, text, file and line; of a reward function and row, too.

    Args:
        error: The error, also one that Ray carried from a reward worker.
        has_row: False: function and row are left out, but for a call that never came into the function.
    """
    cause, mark = error, _mark_of(error)
    if not mark[1]:
        with contextlib.suppress(Exception):  # an author's class may answer any name
            found = getattr(error, "cause", None)
            # Ray's error has the traceback for its text, and the error that was raised as its cause.
            if isinstance(found, BaseException) and (_mark_of(found)[1] or type(error).__module__.startswith("ray.")):
                cause, mark = found, _mark_of(found)
    place, named, row = mark
    if not named:
        return describe(cause) + place_of(cause)
    if place and not has_row:
        return describe(cause) + place
    given = f", which was given {row}" if has_row else ""
    return f"{describe(cause)}{place}, {'in' if place else 'at the call of'} the reward function {named}{given}"


def _mark_of(error: BaseException) -> tuple[str, str, str]:
    """Return place, function and row that `_mark` noted in an error; texts that are empty where it noted none."""
    try:
        place, named, row = map(str, getattr(error, _MARK, ("", "", "")))
    except Exception:  # an author's class may answer any name
        return "", "", ""
    return place, named, row


def _mark(error: Exception, function: Callable[..., Any], row: Mapping[str, Any]) -> None:
    """Note in an error where it was raised, since a traceback does not leave a reward worker."""
    file = _file_of(function)
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    # A call that does not fit the function is raised in a file of verl's.
    place = place_of(error) if file is None or file in files else ""
    with contextlib.suppress(Exception):  # an author's class may take no attribute
        setattr(error, _MARK, (place, name_of(function), row_name(row)))


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a reward function for messages, and its file: `my_rewards:score (/home/me/my_rewards.py)`."""
    written, file = _written(function), _file_of(function)
    name = getattr(written, "__qualname__", None) or type(written).__qualname__
    module = str(getattr(written, "__module__", ""))
    # verl imports a file under a name that it draws.
    named = name if not module or module.startswith("custom_module") else f"{module}:{name}"
    return f"{named} ({file})" if file else named


def _written(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        # verl's is a partial of a function of its own, whose first argument is the author's.
        function = next((each for each in function.args if callable(each)), function.func)
    return inspect.unwrap(function)


def _file_of(function: Callable[..., Any]) -> str | None:
    written = _written(function)
    try:
        return inspect.getsourcefile(written if hasattr(written, "__qualname__") else type(written))
    except (TypeError, OSError):  # a builtin, or a class of a notebook
        return None


def _read(result: Any, named: str, row: Mapping[str, Any]) -> Any:
    try:
        score_of(result)
    except NoNumberError as error:
        what = message_of(error).removeprefix("got ")
    except UnusableNumberError as error:
        what = f"a reward that cannot be used: {message_of(error)}"
    else:
        return result
    raise RewardContractError(f"the reward function {named} was given {row_name(row)}, and returned {what}")


def row_name(row: Mapping[str, Any]) -> str:
    """Return the name of a row, by its author's name for it.

    Args:
        row: Keywords of verl's call of a reward function. Example of the result: `the row with extra_info.index 1,
            data_source 'sums', ground_truth '7'`.
    """
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    known = [] if index is None else [f"extra_info.index {show(index)}"]
    for key in ("data_source", "ground_truth"):
        value = row.get(key)
        known.append(f"{key} {show(str(value) if isinstance(value, str) else value, _LONGEST)}")  # not NumPy's str
    return f"the row with {', '.join(known)}"
