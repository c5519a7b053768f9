"""The choice among the tools that a server lists, by the `include` and `exclude` of its entry."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from verl_multiturn.errors import ConfigError


def chosen_names(
    names: Sequence[str], include: Sequence[str], exclude: Sequence[str], label: str, where: str, kind: str = "tool"
) -> set[str]:
    """Return the names that patterns choose; the entries of MCP servers and of A2A agents use it.

    Args:
        names: All names.
        include: Patterns (`fnmatch`) of those that are chosen.
        exclude: Patterns of those that are not, although `include` names them.
        label: Name of the server, for errors.
        where: The place that errors name, for example `tools.yaml: tools[0].mcp`.
        kind: Word for what has the names.

    Raises:
        ConfigError: A pattern fits no name, or `exclude` leaves none.
    """
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(_fits(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:10]
                raise ConfigError(
                    f"{where}.{key}: {pattern!r} fits none of the {len(names)} {kind}s of {label}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                )
    chosen = {
        name
        for name in names
        if any(_fits(name, pattern) for pattern in include) and not any(_fits(name, pattern) for pattern in exclude)
    }
    if not chosen:
        raise ConfigError(f"{where}: 'exclude' leaves none of the {kind}s {names}; exclude fewer")
    return chosen


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # a name may hold signs with a meaning in a pattern
