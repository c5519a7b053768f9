"""Contract tests, with which the author of an interaction finds mistakes before a run does.

    findings = check_interaction(Maze({"size": 5}), kwargs={"seed": 1}, actions=["up", "left"])
    assert not [finding for finding in findings if finding.verdict is Grade.PROBLEM]

The tests call it as the runtime does: on one event loop, with many conversations at once, and each of its methods may
be cancelled at any moment. The command line's `check-interaction` prints the same findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.checking.episodes import InteractionProbe
from verl_multiturn.checking.examination import CheckResult, Grade, run_examination
from verl_multiturn.checking.interaction_examination import InteractionExamination
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import (
    build_interaction,
    check_kwargs,
    check_methods,
    load_interactions,
)
from verl_multiturn.rows.files import read_text

__all__ = ["CheckResult", "Grade", "check_interaction", "interactions_to_check", "read_actions"]

_SUFFIXES = (".yaml", ".yml")


def check_interaction(
    interaction: Interaction,
    kwargs: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    rounds: int = 8,
    timeout_s: float | None = None,
) -> list[CheckResult]:
    """Examine an interaction; this takes seconds, and plays some hundred conversations.

    Args:
        interaction: The interaction.
        kwargs: A row's kwargs for it.
        actions: The player's texts, turn by turn, and again from the first; empty to draw it.
        rounds: Largest number of turns of an episode.
        timeout_s: Seconds after which a call counts as hanging; None: the `limits.timeout_s` of its
            YAML entry, from 10 to 60.

    Returns:
        One finding for each check, in the order of the checks.

    Raises:
        ConfigError: It cannot be called, or not with these kwargs.
    """
    check_methods(interaction)
    check_kwargs(interaction, kwargs or {}, "check-interaction")
    probe = InteractionProbe(interaction, kwargs or {}, actions, rounds, timeout_s)
    return run_examination(lambda *given: InteractionExamination(probe, *given), probe.end_s)


def interactions_to_check(target: str, config: Mapping[str, Any] | None, name: str | None = None) -> list[Interaction]:
    """Return the interactions that a command line names.

    Args:
        target: A class as `package.module.Class` or by its reference, `package/name`; or the path of a YAML file with
            interactions; `FILE:NAME` for one of them.
        config: The `config` of a class; None for an empty one.
        name: Name of the only interaction wanted; None for all.

    Raises:
        ConfigError: There is no such interaction, or it cannot be built.
    """
    path, _, named = target.rpartition(":")
    if not path.endswith(_SUFFIXES):
        path, named = target, ""
    if named and name not in (None, named):
        raise ConfigError(f"{target} and --interaction {name!r} name two interactions; leave one out")
    name = name or named or None
    if path.endswith(_SUFFIXES):
        if config is not None:
            raise ConfigError(f"{target}: --config belongs to a class; leave it out for a YAML")
        loaded = load_interactions(path)
    else:
        made = build_interaction({"class_name": target, "config": dict(config or {})}, "check-interaction")
        loaded = {made.name: made}
    if name is None:
        return list(loaded.values())
    if name not in loaded:
        raise ConfigError(f"{target}: no interaction {name!r}; known are {sorted(loaded)}")
    return [loaded[name]]


def read_actions(path: Path | None) -> list[str]:
    """Return the lines of a file with the player's turns; none without a file.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    if path is None:
        return []
    text = read_text(path, f"--actions {str(path)!r}", "give a text, one turn a line")
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--actions {str(path)!r} is empty; write one turn a line, or leave it out")
    return lines
