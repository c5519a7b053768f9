"""Loading of interactions from a YAML file, and the choice of one by a data row.

The file has the form that verl had:

    interaction:
      - name: maze
        class_name: my_package.maze.Maze
        config: {size: 5}
        limits: {timeout_s: 20, concurrency: 64}

`class_name` may be the reference of an installed package's class, too (`calls/loading/entry_points.py`). `name` may be
omitted: it is the class's name in lower case, without `Interaction` at its end. `limits` are ours.
A class may derive from our `Interaction`, or be one that was written for verl 0.4 to 0.6 (`old_verl/classes.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.calls.limits import CallLimits, set_limits
from verl_multiturn.calls.loading.dotted_names import resolve_class
from verl_multiturn.calls.loading.list_file import ListFile, check_keys, construct
from verl_multiturn.chat.messages import check_last_speaker, plain, read_messages
from verl_multiturn.describe import did_you_mean, show, unbound
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.old_verl import modules as verl_modules
from verl_multiturn.interactions.old_verl.classes import (
    OLD_CALLS,
    AdaptedInteraction,
    BaseInteraction,
    adapted,
    is_old_class,
)
from verl_multiturn.tools.loading.kwargs import check_shown

_FILE = ListFile(
    "interaction_config_path",
    "interaction",
    "give the path of an interaction YAML",
    "name",
    "give one of them another `name`",
)
KWARGS = "interaction_kwargs"
"""Key of a row's `extra_info` by which it chooses an interaction."""
_ENTRY_KEYS = {"name", "class_name", "config", "limits"}


def load_interactions(path: str | Path) -> dict[str, Interaction]:
    """Load the interactions of a YAML file, by name, in the file's order.

    Raises:
        ConfigError: There is no such file, it is not YAML, a key is unknown, a class cannot be found or built, or two
            interactions have one name.
    """
    return _FILE.load(path, lambda entry, where: [build_interaction(entry, where)])


def build_interaction(entry: Any, where: str) -> Interaction:
    """Build the interaction of one entry of a YAML file.

    Args:
        entry: The entry as it is in the file.
        where: The place that errors name, for example `users.yaml: interaction[0]`.

    Raises:
        ConfigError: A key is unknown, or the class cannot be found or built.
    """
    if not isinstance(entry, Mapping) or "class_name" not in entry:
        raise ConfigError(f"{where}: expected a mapping with 'class_name', got {entry!r:.200}")
    check_keys(entry, _ENTRY_KEYS, where, f"known are {sorted(_ENTRY_KEYS)}")
    found = interaction_class(entry["class_name"], f"{where}.class_name")
    name = entry.get("name") or default_name(found)
    if not isinstance(name, str):
        raise ConfigError(f"{where}.name: expected text, got {name!r}")
    interaction: Interaction = construct(entry, "class_name", where, lambda config: _made(found, config, name))
    if entry.get("limits") is not None:
        set_limits(interaction, entry["limits"], CallLimits, f"{where}.limits")
    return interaction


def default_name(found: type) -> str:
    """Return the name of an interaction whose entry has none, for example `maze` of `MazeInteraction`."""
    return found.__name__.lower().removesuffix("interaction") or found.__name__.lower()


def _made(found: Any, config: dict[str, Any], name: str) -> Interaction:
    interaction: Interaction
    if is_old_class(found):  # verl puts the name among the settings
        interaction = adapted(found(config={**config, "name": name}))
    else:
        interaction = found(config)
        check_methods(interaction)
    interaction.name = name  # whatever name the class gives itself: rows choose by the entry's
    return interaction


def check_methods(interaction: Interaction) -> None:
    """Refuse an interaction with a method that cannot be called as it is in a run, whatever kwargs a row has.

    Raises:
        ConfigError: There is such a method.
    """
    ends = {"score": ("id",), "close": ("id",), "aclose": ()}
    for method, positional in {"start": ("id",), "reply": ("id", ()), **ends}.items():
        signature = inspect.signature(getattr(interaction, method))
        try:
            # A row may give the arguments that `start` and `reply` miss here.
            (signature.bind if method in ends else signature.bind_partial)(*positional)
        except TypeError as error:
            given = ", ".join(("instance_id", "messages")[: len(positional)])
            raise ConfigError(
                f"{type(interaction).__name__}.{method}{signature} cannot be called as {method}({given}): {error}; "
                "mend its parameters"
            ) from None


def interaction_class(name: Any, where: str) -> Any:
    """Return the class of an interaction, ours or an old one of verl's, by its dotted name or its reference.

    Args:
        name: The name, `package.module.Class`, or the reference of an installed package's class, `package/name`.
        where: The place that errors name.

    Raises:
        ConfigError: There is no such class, it is not an interaction, or it answers nothing.
    """
    verl_modules.install()  # the author's module may import them
    found = resolve_class(verl_modules.ours(name), where, "interactions")
    base: type = BaseInteraction if is_old_class(found) else Interaction
    method = "generate_response" if is_old_class(found) else "reply"
    if base is Interaction and not issubclass(found, Interaction):
        raise ConfigError(f"{where}: {name!r} is no interaction; derive it from Interaction")
    if getattr(found, method) is getattr(base, method):
        raise ConfigError(f"{where}: {name!r} does not define {method}(), so no turn would be answered")
    return found


def interaction_of_row(
    row: Mapping[str, Any], interactions: Mapping[str, Interaction], where: str
) -> tuple[Interaction | None, dict[str, Any]]:
    """Return the interaction that a data row has, and its kwargs.

    A row chooses by `extra_info.interaction_kwargs = {name: {…}}`, or as verl had it, `{"name": name, …}`. A row that
    names none has the run's only interaction. In a run without interactions a row has none.

    Args:
        row: The row as verl's data set returns it; `interaction_kwargs` and `extra_info` are read.
        interactions: All interactions of the run, by name.
        where: The place that errors name, for example `data row 7`.

    Raises:
        ConfigError: The row names an interaction that the run does not have, more than one, or none where there are
            several; it has none and hides a tool; or `start` or `reply` cannot be called with its kwargs.
    """
    extra_info = row.get("extra_info")
    given = row.get(KWARGS) or (extra_info.get(KWARGS) if isinstance(extra_info, Mapping) else None)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {KWARGS} must map the name of an interaction to kwargs, got {given!r:.200}")
    # Parquet gives every row the keys of all rows, with None where a row has no value.
    named = {key: value for key, value in (given or {}).items() if value is not None}
    if not interactions:
        if named:
            raise ConfigError(
                f"{where}: {KWARGS} names {sorted(named)[0]!r}, but the run has no interactions; set "
                "custom.multiturn.interaction_config_path (validate: --interactions)"
            )
        check_shown(row, where)
        return None, {}
    if isinstance(named.get("name"), str):
        name = named.pop("name")
        kwargs: Any = named
    elif len(named) > 1:
        raise ConfigError(f"{where}: {KWARGS} names {sorted(named)}; a conversation has one interaction")
    elif named:
        ((name, kwargs),) = named.items()
    elif len(interactions) == 1:
        name, kwargs = next(iter(interactions)), {}
    else:
        raise ConfigError(f"{where}: {KWARGS} names none of the run's interactions {sorted(interactions)}; name one")
    if name not in interactions:
        hint = did_you_mean(str(name), interactions) or f"known are {sorted(interactions)}"
        raise ConfigError(f"{where}: {KWARGS} names {name!r}, which is no interaction of the YAML; {hint}")
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"{where}: {KWARGS}[{name!r}] must be a mapping, got {kwargs!r:.200}")
    kwargs = plain(kwargs)
    check_kwargs(interactions[name], kwargs, where)
    return interactions[name], kwargs


def check_row(row: Mapping[str, Any], interactions: Mapping[str, Interaction], where: str) -> None:
    """Refuse a data row that does not fit the interactions of a run, or whose last message gets no answer.

    Args:
        row: A row of a data file.
        interactions: As for `interaction_of_row`.
        where: As for `interaction_of_row`.

    Raises:
        ConfigError: As for `interaction_of_row`; or the row ends in an assistant's message that nothing answers.
    """
    interaction, _ = interaction_of_row(row, interactions, where)
    if "prompt" in row:
        check_last_speaker(read_messages(row["prompt"], where), interaction is not None, where)


def check_kwargs(interaction: Interaction, kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse kwargs with which an interaction cannot be called.

    Args:
        interaction: The interaction.
        kwargs: The row's kwargs for it.
        where: The place that errors name.

    Raises:
        ConfigError: `start` or `reply`, or the old methods of the same kind, do not take them.
    """
    if isinstance(interaction, AdaptedInteraction):
        calls = [(method, getattr(interaction.old, method), interaction.named(method, kwargs)) for method in OLD_CALLS]
    else:
        calls = [(method, getattr(interaction, method), dict(kwargs)) for method in ("start", "reply")]
    for (method, function, given), positional in zip(calls, (("id",), ("id", ())), strict=True):
        signature = inspect.signature(function)
        if why := unbound(signature, positional, given):
            raise ConfigError(
                f"{where}: interaction {interaction.name!r}: {method}{signature} cannot be called with "
                f"{show(dict(kwargs))}: {why}; correct the row's {KWARGS}, or the method's parameters"
            )
