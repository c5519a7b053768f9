"""Rows of BFCL's dialogues, and which of them are for training."""

from __future__ import annotations

from collections.abc import Sequence

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, make_row
from verl_multiturn.task_sets.bfcl.package import CATEGORIES, Dialogue, dialogues, documents_of

SYSTEM_PROMPT = (
    "You help a user with the functions that you have. Call them, one after the other, until the request is done. Then "
    "say in one sentence what you did, and wait for the next request. If you lack a function or a value, "
    "say which, and call nothing."
)


def tools_of(dialogue: Dialogue) -> list[str]:
    """Return the names of all functions of a dialogue's classes."""
    return [document["name"] for name in dialogue.classes for document in documents_of(name)]


def needed(dialogue: Dialogue) -> list[str]:
    """Return the names of the functions that a dialogue's gold calls need, in the tools' order."""
    called = {call.name for calls in dialogue.gold for call in calls}
    return [name for name in tools_of(dialogue) if name in called]


def row(dialogue: Dialogue, tools: Sequence[str] | None = None) -> Row:
    """Return the row of a dialogue. The user sends the first turn when the conversation has started.

    Args:
        dialogue: The dialogue.
        tools: Functions that the model has; None: all of the dialogue's classes.
    """
    names = tools or tools_of(dialogue)
    hidden = {name for shown in dialogue.hidden.values() for name in shown}
    return make_row(
        f"bfcl/{dialogue.id.removeprefix('multi_turn_').rpartition('_')[0]}",
        [{"role": "system", "content": SYSTEM_PROMPT}],
        "",
        ability="dialogue",
        tools=names,
        tools_kwargs={name: {"shown": name not in hidden} for name in names} if hidden else None,
        interaction="bfcl",
        interaction_kwargs={"id": dialogue.id},
        dialogue=dialogue.id,
    )


def read_categories(given: str) -> list[str]:
    """Return the categories that `--source` names, with `+` between them.

    Raises:
        ConfigError: One is unknown.
    """
    names = given.split("+")
    for name in names:
        if name not in CATEGORIES:
            raise ConfigError(
                f"--source: {name!r} is no category; expected some of {list(CATEGORIES)} with + between them"
            )
    return names


def splits(train: Sequence[str]) -> dict[str, list[Dialogue]]:
    """Return the dialogues for training and for validation.

    A dialogue with one number is in all four categories the same one, changed a little. So the numbers are split: those
    that are even train, in the categories of `train`, and the odd ones of all categories validate.
    """
    found = {name: list(dialogues(name).values()) for name in CATEGORIES}
    return {
        "train": [dialogue for name in train for dialogue in found[name][::2]],
        "test": [dialogue for each in found.values() for dialogue in each[1::2]],
    }
