"""An algorithm of one's own: a function from the conversations of a group to their advantages.

    def advantages(group: Sequence[GroupMember], **options) -> Sequence[float | Sequence[float]]

    load_function(name, options)  →  AdvantageFunction.of_groups(groups)  →  an advantage for each turn

It returns a number for each member, or one for each turn of a member. A class with `__call__`, `state_dict` and
`load_state_dict`, which is built without arguments, keeps a state from step to step.

Invariants:
- the function gets valid members alone, and options, as copies: it can change nothing of the batch, nor of its next
  call. Turns are in the order of their numbers;
- all that it returns is a finite number for each turn, or an error names function, group and value;
- JSON holds a state without a change, so that a checkpoint gives back the same.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.advantages.options import read_options
from verl_multiturn.advantages.turns import Advantages, GroupMember
from verl_multiturn.calls.loading.dotted_names import resolve_place
from verl_multiturn.describe import describe, place_of, show
from verl_multiturn.errors import AdvantageContractError, ConfigError, RewardContractError
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rows.reward_numbers import LARGEST_SCORE, NoNumberError, UnusableNumberError, as_reward

ESTIMATOR = "algorithm.adv_estimator"
"""The setting that names the function."""
GROUP = "advantages"
"""The group of entry points whose references the setting takes."""
SLOW_S = 10.0
"""Seconds of a step that the function may take before a warning."""
STILL_S = 60.0
"""Seconds after which a warning says that the function has not returned: nothing ends one that never does."""
_STATE = ("state_dict", "load_state_dict")
_logger = logging.getLogger(__name__)


@dataclass
class AdvantageFunction:
    """A function of advantages with its options, or an object that is called as one; for estimator and checks."""

    name: str
    """Its place as the setting names it; for errors."""
    call: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of each call."""
    made: type | None = None
    """The class that `call` is an object of, if it was named by its class."""
    _warned: bool = field(default=False, init=False, repr=False)

    @property
    def has_state(self) -> bool:
        """Return whether it keeps a state that belongs into checkpoints."""
        return all(callable(getattr(self.call, name, None)) for name in _STATE)

    def fresh(self) -> AdvantageFunction:
        """Return the function as at the start of a run: with a new object of its class, if it is one."""
        return self if self.made is None else function_of(self.made, self.options, self.name)

    def of_groups(self, groups: Mapping[str, Sequence[GroupMember]]) -> dict[str, Advantages]:
        """Return the advantages of a step's groups; warn once if that takes more than `SLOW_S`, or is not over yet.

        Args:
            groups: All members of each (prompt, role), by the name that errors have for it.

        Raises:
            AdvantageContractError, RewardContractError: As in `of_group`.
        """
        began = time.monotonic()
        waiting = threading.Timer(STILL_S, _warn_of_hang, [self.name])
        waiting.daemon = True
        waiting.start()
        try:
            made = {label: self.of_group(group, label) for label, group in groups.items()}
        finally:
            waiting.cancel()
        seconds = time.monotonic() - began
        if seconds > SLOW_S and not self._warned:
            self._warned = True
            _logger.warning(
                "%s=%r took %.0f s for the %d groups of a step, while all devices waited; make it faster",
                ESTIMATOR, self.name, seconds, len(groups),
            )  # fmt: skip
        return made

    def of_group(self, group: Sequence[GroupMember], label: str) -> Advantages:
        """Return the advantage of each turn of each member, in the order in which they were given.

        Args:
            group: All members of one (prompt, role). Invalid ones have 0, and the function is not shown them.
            label: Name of the group for errors, such as its uid.

        Raises:
            AdvantageContractError: The function raised, or returned something else than a finite number for each
                member or turn.
            RewardContractError: A reward is NaN or infinite, so that there is nothing to compute from.
        """
        orders = [sorted(range(len(each.turns)), key=lambda i: each.turns[i].number) for each in group]
        shown = [_copy(each, order, label) for each, order in zip(group, orders, strict=True) if each.valid]
        values = iter(self._values(shown, label) if shown else [])
        made = []
        for member, order in zip(group, orders, strict=True):
            own = [0.0] * len(order)
            if member.valid:
                for i, value in zip(order, next(values), strict=True):
                    own[i] = value
            made.append(own)
        return made

    def _values(self, shown: list[GroupMember], label: str) -> Advantages:
        counts = [len(each.turns) for each in shown]  # the function may sort or cut its list
        try:
            returned = self.call(list(shown), **copy.deepcopy(dict(self.options)))
        except (Exception, SystemExit) as error:  # an author's code may raise anything
            raise AdvantageContractError(
                f"{ESTIMATOR}={self.name!r} raised {describe(error)}{place_of(error)} for "
                f"{_shown_group(shown, label)}; mend that line"
            ) from error
        values = _items(returned)
        if values is None:
            raise self._wrong(f"{show(returned)}", f"a list of {len(shown)}, one for each conversation", shown, label)
        if len(values) != len(shown):
            wanted = f"{len(shown)}, one for each conversation"
            raise self._wrong(f"{len(values)} values, {show(returned)},", wanted, shown, label)
        return [self._of_member(value, i, counts[i], shown, label) for i, value in enumerate(values)]

    def _of_member(self, value: Any, i: int, count: int, shown: list[GroupMember], label: str) -> list[float]:
        items = _items(value)
        if items is not None and len(items) != count:
            said = f"{len(items)} values, {show(value)}, for conversation {i}"
            raise self._wrong(said, f"one number, or {count}, one for each of its turns", shown, label)
        made = []
        for item in [value] if items is None else items:
            try:
                made.append(as_reward(item, LARGEST_SCORE))
            except (NoNumberError, UnusableNumberError):
                wanted = f"a finite number from {-LARGEST_SCORE:g} to {LARGEST_SCORE:g}"
                raise self._wrong(f"{show(item)} for conversation {i}", wanted, shown, label) from None
        return made if items is not None else made * count

    def _wrong(self, said: str, wanted: str, shown: list[GroupMember], label: str) -> AdvantageContractError:
        return AdvantageContractError(
            f"{ESTIMATOR}={self.name!r} returned {said} in {_shown_group(shown, label)}; return {wanted}"
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON holds it; only where `has_state`.

        Raises:
            AdvantageContractError: `state_dict` raised, or returned a value that JSON would change.
        """
        try:
            found = self.call.state_dict()  # type: ignore[attr-defined]
        except (Exception, SystemExit) as error:
            raise AdvantageContractError(
                f"{ESTIMATOR}={self.name!r}: state_dict() raised {describe(error)}{place_of(error)}; mend that line"
            ) from error
        problem = not_plain(found, "it") if isinstance(found, dict) else f"{show(found)} is not a dictionary"
        if problem:
            raise AdvantageContractError(
                f"{ESTIMATOR}={self.name!r}: state_dict(): {problem}; return a dictionary of texts, finite numbers, "
                "lists and dictionaries with texts as keys: a checkpoint holds it as JSON"
            )
        return dict(found)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint; only where `has_state`.

        Raises:
            AdvantageContractError: `load_state_dict` raised.
        """
        try:
            self.call.load_state_dict(dict(state))  # type: ignore[attr-defined]
        except (Exception, SystemExit) as error:
            raise AdvantageContractError(
                f"{ESTIMATOR}={self.name!r}: load_state_dict({show(state)}) raised {describe(error)}{place_of(error)}; "
                "let it take the result of state_dict()"
            ) from error


def _warn_of_hang(name: str) -> None:
    _logger.warning(
        "%s=%r has not returned for %.0f s, while all devices wait; if it never does, stop the run and mend it",
        ESTIMATOR, name, STILL_S,
    )  # fmt: skip


def load_function(name: str, options: Mapping[str, Any] | None = None) -> AdvantageFunction:
    """Import a function of advantages, and read its options; for the estimator at the start, and `check-advantage`.

    Args:
        name: `package.module:function`, `path/to/file.py:function`, or `package/name`, the reference of an installed
            package's function; a class in the place of the function.
        options: Its keywords.

    Raises:
        ConfigError: There is no such function, it cannot be called with a group, or it does not take the options.
    """
    return function_of(resolve_place(name, ESTIMATOR, GROUP), options or {}, name)


def function_of(found: Any, options: Mapping[str, Any], name: str) -> AdvantageFunction:
    """Return an author's object as a function of advantages.

    Args:
        found: A function, an object that is called as one, or a class that is built without arguments.
        options: As in `load_function`.
        name: The place where it was found, for errors.

    Raises:
        ConfigError: As in `load_function`.
    """
    where = f"{ESTIMATOR}={name!r}"
    call = found
    if isinstance(found, type):
        try:
            call = found()
        except (Exception, SystemExit) as error:  # an author's code may raise anything
            raise ConfigError(
                f"{where}: the class cannot be built without arguments ({describe(error)}); give each a default: "
                "options are the keywords of its __call__"
            ) from error
    if not callable(call):
        remedy = "give the class a method __call__(self, group)" if isinstance(found, type) else "name a function"
        raise ConfigError(f"{where} is {show(found, 100)}, which cannot be called; {remedy}")
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
        raise ConfigError(f"{where} is asynchronous, and is called between two steps; write it with def")
    states = [name for name in _STATE if callable(getattr(call, name, None))]
    if states and not isinstance(found, type):
        raise ConfigError(f"{where} is an object with {states[0]}(); name its class, so that each run begins anew")
    if isinstance(found, type) and len(states) < len(_STATE):
        lacking = [name for name in _STATE if name not in states]
        raise ConfigError(
            f"{where} has no {' and no '.join(lacking)}; write state_dict() and load_state_dict(state), so that "
            "checkpoints hold its state, or a function if it keeps nothing"
        )
    return AdvantageFunction(name, call, read_options(call, options, where), found if isinstance(found, type) else None)


def not_plain(value: Any, place: str = "") -> str:
    """Return which part of a value JSON would give back as something else, and why; "" where it holds all.

    Args:
        value: The value.
        place: Its place in the whole, as in `['a'][0]`.
    """
    if value is None or isinstance(value, bool | int | str):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{place} is {value}"
    if type(value) is list:
        return next(filter(None, (not_plain(each, f"{place}[{i}]") for i, each in enumerate(value))), "")
    if type(value) is dict:
        if wrong := [key for key in value if not isinstance(key, str)]:
            return f"{place} has the key {show(wrong[0], 60)}, which is not a text"
        return next(filter(None, (not_plain(each, f"{place}[{show(key, 60)}]") for key, each in value.items())), "")
    return f"{place} is {show(value, 100)} of type {type(value).__name__}"


def _copy(member: GroupMember, order: Sequence[int], label: str) -> GroupMember:
    """Return a valid member as the function gets it: the documented fields alone, in the order of turns."""
    turns = [member.turns[i] for i in order]
    made = GroupMember(
        [Turn(each.number, each.earned, each.state, each.parent, each.after, each.role) for each in turns],
        outcome=member.outcome,
        role=member.role,
    )
    for turn in made.turns:
        if not math.isfinite(turn.earned or 0.0):
            raise RewardContractError(f"{label}: turn {turn.number} of a conversation has the reward {turn.earned}")
    if not math.isfinite(member.outcome):
        raise RewardContractError(f"{label}: a conversation has the reward {member.outcome}")
    return made


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple, or an array with dimensions; None for anything else, a number among them."""
    if isinstance(value, list | tuple):
        return list(value)
    try:
        return list(value.tolist()) if value.ndim else None
    except Exception:  # whatever else it is
        if inspect.iscoroutine(value):
            value.close()  # Python would warn of one that is never awaited
        return None


def _shown_group(shown: Sequence[GroupMember], label: str) -> str:
    rewards = [member.reward for member in shown]
    return f"the group {label} of {len(shown)} conversation{'s' * (len(shown) != 1)} with the rewards {show(rewards)}"
