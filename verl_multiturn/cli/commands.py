"""How a command is found by its name, and what is said of a name that is none."""

from __future__ import annotations

from typer.core import TyperGroup

from verl_multiturn.describe import did_you_mean

_OTHERS = {
    "train": "run",
    "launch": "run",
    "start": "run",
    "evaluate": "eval",
    "test": "check-tool",
    "check": "validate",
    "lint": "validate",
    "recipes": "recipe",
    "init": "recipe new",
    "new": "recipe new",
    "copy": "recipe copy",
    "list": "recipe list",
    "visualize": "view",
    "ui": "view",
    "version": "--version",
}
"""Names that other programs have for our commands."""


class Commands(TyperGroup):
    """The commands. A name that is none is refused with the one that was probably meant."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # typer's own types are private
        """Return the command that the words begin with."""
        name = args[0] if args else ""
        if name and name not in self.commands:
            hint = f"did you mean {_OTHERS[name]!r}?" if name in _OTHERS else did_you_mean(name, self.commands)
            ctx.fail(f"no command {name!r}; {hint or 'verl-multiturn -h lists all'}")
        return super().resolve_command(ctx, args)
