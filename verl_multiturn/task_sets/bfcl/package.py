"""Contents of the installed package `bfcl-eval`: the classes of the worlds, their functions, and the dialogues.

Invariants:
- only data files and the classes of `CLASSES` are used. The package's own executor is not: it evaluates a model's text
  as Python, and keeps each world in a module forever;
- a gold call is read, never evaluated: its arguments are literals.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.syntax import parse_expression

CLASSES: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""The classes of worlds, and the name of the module and of the file with the functions of each."""
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
INSTALL = f"{sys.executable} -m pip install --no-deps bfcl-eval==2026.3.23 mpmath"
_SOURCE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"


@dataclass(frozen=True)
class WorldCall:
    """A call of a function of a world.

    Attributes:
        name: The function.
        arguments: Its arguments by name.
        positional: Arguments without a name; only gold calls have such.
    """

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    """A dialogue: the user's turns, and the right calls.

    Attributes:
        id: Its id in the data, for example `multi_turn_base_0`.
        turns: The user's turns.
        gold_text: The right calls of each turn as the data has them.
        gold: The same, read, with all arguments by name. Where there are none, whatever the model does is right.
        classes: Names of the classes of its worlds.
        config: State of each class at the beginning, by name.
        hidden: Functions that the model does not have at first: by the index of the turn that shows them.
        path: Functions that the authors of the data had in mind.
        long_context: Whether the worlds have much more in them than the dialogue needs.
    """

    id: str
    turns: tuple[str, ...]
    gold_text: tuple[tuple[str, ...], ...]
    gold: tuple[tuple[WorldCall, ...], ...]
    classes: tuple[str, ...]
    config: Mapping[str, Any]
    hidden: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    long_context: bool = False


def data_folder() -> Path:
    """Return the folder of the package's data.

    Raises:
        ConfigError: The package is not installed.
    """
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"BFCL's dialogues need the package 'bfcl-eval', which is not installed; {INSTALL}")
    return Path(found.submodule_search_locations[0]) / "data"


def check_class(name: Any, where: str) -> None:
    """Refuse a class that is not a world of the list.

    Raises:
        ConfigError: It is none.
    """
    if name not in CLASSES:
        hint = did_you_mean(str(name), CLASSES) or f"known are {sorted(CLASSES)}"
        raise ConfigError(f"{where}: {show(name)} is no class of BFCL's worlds; {hint}")


@functools.cache
def world_class(name: str) -> Any:
    """Import the class of a world.

    Raises:
        ConfigError: It is not in the list, or the package, or one that it needs, is not installed.
    """
    check_class(name, "involved_classes")
    data_folder()
    try:
        module = importlib.import_module(f"{_SOURCE}.{CLASSES[name]}")
    except ImportError as error:
        raise ConfigError(f"class {name!r} of BFCL's worlds cannot be imported: {error}; {INSTALL}") from error
    return getattr(module, name)


@functools.cache
def methods_of(name: str) -> frozenset[str]:
    """Return the names of the functions of a class that a model may call."""
    found = inspect.getmembers(world_class(name), inspect.isfunction)
    return frozenset(method for method, _ in found if not method.startswith("_"))


@functools.cache
def parameters_of(classes: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, in their order; none if no class of these has the function."""
    owners = [each for each in classes if name in methods_of(each)]
    return tuple(inspect.signature(getattr(world_class(owners[-1]), name)).parameters)[1:] if owners else ()


def named(classes: tuple[str, ...], call: WorldCall) -> WorldCall:
    """Return a gold call with all its arguments by name, as a model makes it.

    Raises:
        ConfigError: No class of these has the function, or it takes fewer arguments.
    """
    if not any(call.name in methods_of(each) for each in classes):
        raise ConfigError(
            f"gold call of {call.name!r}: none of the classes {list(classes)} has it; mend involved_classes"
        )
    names = parameters_of(classes, call.name)
    if len(call.positional) > len(names):
        raise ConfigError(
            f"gold call of {call.name!r}: it takes {list(names)}, got {list(call.positional)}; mend the call"
        )
    return WorldCall(call.name, dict(zip(names, call.positional, strict=False)) | dict(call.arguments))


@functools.cache
def documents_of(name: str) -> tuple[Mapping[str, Any], ...]:
    """Return the descriptions of a class's functions, as the package has them.

    Raises:
        ConfigError: The class is not in the list, or the package is not installed.
    """
    check_class(name, "involved_classes")
    path = data_folder() / "multi_turn_func_doc" / f"{CLASSES[name]}.json"
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)


@functools.cache
def functions_shown() -> str:
    """Return the user's text in a turn that shows the model functions which it did not have before."""
    data_folder()
    prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
    return str(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)


def read_call(text: str) -> WorldCall:
    """Read a gold call, such as `cd(folder='document')`.

    Raises:
        ConfigError: It is not a call of a function by its name with literal arguments.
    """
    try:
        node = parse_expression(text.strip())
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("it calls no function by its name")
        named = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        positional = tuple(ast.literal_eval(each) for each in node.args)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"gold call {text!r:.200}: {error}; write it as name(argument='value')") from None
    return WorldCall(node.func.id, {name: value for name, value in named.items() if name is not None}, positional)


def read_dialogue(entry: Mapping[str, Any], gold: Sequence[Sequence[str]]) -> Dialogue:
    """Read a dialogue in the form of BFCL's data.

    Args:
        entry: `id`, `question` (for each turn a list of messages, empty where functions are shown), `initial_config`,
            `involved_classes`, and perhaps `missed_function` (by turn) and `path`.
        gold: For each turn the right calls, as text.

    Raises:
        ConfigError: A key is missing, a class is not in the list, a call is not literal, or the turns do not fit.
    """
    try:
        name, question = str(entry["id"]), entry["question"]
        classes, config = tuple(entry["involved_classes"]), copy.deepcopy(dict(entry["initial_config"]))
        turns = tuple("\n".join(message["content"] for message in turn) for turn in question)
        hidden = {int(turn): tuple(names) for turn, names in (entry.get("missed_function") or {}).items()}
        path = tuple(step.rpartition(".")[2] for step in entry.get("path") or ())
        gold_text = tuple(tuple(map(str, calls)) for calls in gold)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"dialogue {show(entry, 120)}: {type(error).__name__}: {error}; expected the form of BFCL's data, with "
            "'id', 'question', 'initial_config' and 'involved_classes', and for each turn a list of gold calls"
        ) from None
    if not turns or len(turns) != len(gold_text):
        raise ConfigError(
            f"dialogue {name!r}: {len(turns)} turns and gold calls of {len(gold_text)}; give both, equally many"
        )
    for each in classes:
        check_class(each, f"dialogue {name!r}: involved_classes")
    return Dialogue(
        id=name,
        turns=tuple(text or functions_shown() for text in turns),
        gold_text=gold_text,
        gold=tuple(tuple(named(classes, read_call(text)) for text in calls) for calls in gold_text),
        classes=classes,
        config=config,
        hidden=hidden,
        path=path,
        long_context="long_context" in name,
    )


@functools.cache
def dialogues(category: str) -> Mapping[str, Dialogue]:
    """Return the 200 dialogues of a category, by id, in their order.

    Raises:
        ConfigError: There is no such category, or the package is not installed.
    """
    if category not in CATEGORIES:
        raise ConfigError(f"category {category!r}: BFCL has no such multi-turn dialogues; known are {list(CATEGORIES)}")
    file = f"BFCL_v4_multi_turn_{category}.json"
    entries, answers = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        for path in (data_folder() / file, data_folder() / "possible_answer" / file)
    )
    gold = {answer["id"]: answer["ground_truth"] for answer in answers}
    return {entry["id"]: read_dialogue(entry, gold[entry["id"]]) for entry in entries}


def dialogue_of(name: str) -> Dialogue:
    """Return a dialogue of the package by its id.

    Raises:
        ConfigError: There is none, or the package is not installed.
    """
    category = str(name).removeprefix("multi_turn_").rpartition("_")[0]
    found = dialogues(category).get(name) if category in CATEGORIES else None
    if found is None:
        raise ConfigError(f"dialogue {show(name)}: BFCL has none; expected an id such as 'multi_turn_base_0'")
    return found
