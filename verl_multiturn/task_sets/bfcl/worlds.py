"""The worlds of one conversation: BFCL's simulated programs, in which calls are made by name.

Invariants:
- a call is a public method of a class of the list, with arguments that are data. No text is evaluated;
- no state is shared: neither by two conversations, nor by the model's worlds and the gold ones, nor with the package;
- whatever a call does wrong becomes its result, in the words of the package's own executor;
- no call takes long: a long one is refused (`_refusal`), and a file system that grew into itself answers no more.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.describe import describe, message_of, show, without_addresses
from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.bfcl.package import methods_of, world_class

MOST_DIGITS = 10_000
"""Most digits that a function of `MathAPI` computes; the package has no limit."""
MOST_ENTRIES = 20_000
"""Most files and folders that a file system may have, each counted by its path; the package has no limit."""
_STATELESS = ("MathAPI",)


class DialogueWorlds:
    """The objects of a dialogue's classes.

    Args:
        classes: Names of the classes. Where two have a method of one name, the later one's is called, as in BFCL.
        config: State of each class at the beginning, by name.
        long_context: Whether the worlds are filled with much more.

    Raises:
        ConfigError: A class is not in the list, cannot be in such a state, or the package is not installed.
    """

    def __init__(self, classes: Sequence[str], config: Mapping[str, Any], long_context: bool = False) -> None:
        self._objects: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._too_large = False
        for name in classes:
            made = world_class(name)()
            if name not in _STATELESS:
                try:
                    made._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)
                except Exception as error:  # the world's code takes the state for a right one
                    raise ConfigError(
                        f"initial_config: {name} cannot be in the state {show(config.get(name), 120)} "
                        f"({describe(error)}); write it as BFCL's data does"
                    ) from error
                if long_context and name != "GorillaFileSystem":  # filled with objects of the package's own modules
                    made.__dict__.update(copy.deepcopy(made.__dict__))
            self._objects[name] = made
            self._owners |= dict.fromkeys(methods_of(name), name)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Make a call, and return its result as the model reads it.

        Args:
            name: The function.
            arguments: Its arguments by name. They are copied.
        """
        owner = self._owners.get(name)
        if owner is None:
            return _failed(f"name {name!r} is not defined")
        if self._too_large:
            return _failed("the file system has become too large")
        method = getattr(self._objects[owner], name)
        if owner != "MathAPI":
            result = _made(method, arguments)
            if name in ("cp", "mv"):
                self._too_large = _is_too_large(self._objects[owner])
            return result
        if refused := _refusal(arguments):
            return _failed(refused)
        mpmath = importlib.import_module("mpmath")
        with decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):  # it sets the precision of the whole process
            return _made(method, arguments)

    def same(self, other: DialogueWorlds) -> dict[str, bool]:
        """Return for each class whether its object is in the same state as the other worlds' one.

        The state are the public attributes.
        """
        if self._too_large:
            return dict.fromkeys(self._objects, False)
        return {name: _is_same(made, other._objects[name]) for name, made in self._objects.items()}


def _made(method: Any, arguments: Mapping[str, Any]) -> str:
    try:
        result = method(**copy.deepcopy(dict(arguments)))
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return without_addresses(str(result))
        return without_addresses(str(result))
    except Exception as error:  # whatever the world's code raises is the call's result, as in BFCL
        return _failed(message_of(error))


def _failed(why: object) -> str:
    return f"Error during execution: {why}"


def _is_same(ours: Any, gold: Any) -> bool:
    return not any(getattr(ours, name) != value for name, value in vars(gold).items() if not name.startswith("_"))


def _refusal(arguments: Mapping[str, Any]) -> str:
    """Return why a call of `MathAPI` is not made; "" where it is. Python would compute for hours, or use up memory."""
    digits = arguments.get("precision", arguments.get("decimal_places", 0))
    base, exponent = arguments.get("base"), arguments.get("exponent")
    bits = abs(exponent) * base.bit_length() if isinstance(base, int) and isinstance(exponent, int) else 0
    if bits > 4 * MOST_DIGITS or (isinstance(digits, int | float) and abs(digits) > MOST_DIGITS):
        return f"at most {MOST_DIGITS} digits are computed"
    return ""


def _is_too_large(files: Any) -> bool:
    """Return whether a file system has more entries than `MOST_ENTRIES`: a folder that was put into itself has."""
    waiting, seen = [files.root], 0
    while waiting:
        for item in waiting.pop().contents.values():
            seen += 1
            if seen > MOST_ENTRIES:
                return True
            if hasattr(item, "contents"):
                waiting.append(item)
    return False


Worlds = DialogueWorlds
"""The name in version 0.1, until 2027-06-01."""
