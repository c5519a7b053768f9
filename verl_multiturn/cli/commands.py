"""Find a command by its name, and suggest one for a name that does not exist.

The module of a command is imported when the command is called, and no other module: most of them import slow packages.
So the list of all commands takes their first sentences from here; tests/unit/cli compares them. The help shows the
commands in groups, by when one needs them.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from verl_multiturn.describe import did_you_mean


class CommandPlace(NamedTuple):
    """Where a command is."""

    module: str
    """Module of this folder."""
    name: str
    """The function in it, or the `Typer` of several commands."""
    help: str
    """First sentences of its help."""


GROUPS = {
    "Write": {
        "recipe": CommandPlace("recipe", "recipes_app", "Recipes: list them, copy one to change it, or make your own."),
        "check-tool": CommandPlace(
            "check", "check_tools", "Check a tool of your own. It is called some hundred times."
        ),
        "check-interaction": CommandPlace(
            "check",
            "check_interactions",
            "Check a simulated user or an environment of your own. Some hundred conversations are played.",
        ),
        "check-advantage": CommandPlace(
            "check",
            "check_advantages",
            "Check a function of advantages of your own. It is called some hundred times.",
        ),
        "validate": CommandPlace(
            "validate", "validate", "Check a tool YAML, an interaction YAML, or both, and, if given, data sets."
        ),
        "serve": CommandPlace(
            "serve",
            "serve",
            "Try an agent against the endpoint: a scripted model answers it, and what would be trained is shown.",
        ),
        "mcp": CommandPlace("mcp", "mcp", "Serve the tools of a YAML to other programs over MCP, as they are here."),
        "a2a": CommandPlace(
            "a2a", "a2a", "Serve the tools of a YAML to other programs as the skills of an A2A agent, as they are here."
        ),
        "index": CommandPlace("corpus", "index", "Build the BM25 index of a corpus, if it is not there yet."),
        "retrieval-server": CommandPlace(
            "corpus",
            "retrieval_server",
            "Serve the BM25 index of a corpus to retrieval tools; build it first, if it is not there yet.",
        ),
    },
    "Train": {
        "install": CommandPlace(
            "install",
            "install",
            "Make an environment: Python, the packages of a lock, and this package as it is here.",
        ),
        "doctor": CommandPlace(
            "doctor",
            "doctor",
            "Show which versions, platform and entry points are here, what is missing and what to do about it.",
        ),
        "run": CommandPlace(
            "run", "run", "Run a recipe: prepare its data, start verl's trainer, show its progress and sum it up."
        ),
        "gateway": CommandPlace(
            "gateway",
            "gateway",
            "Serve a model to agents on one port: each session is recorded with proven tokens, and rewards come by "
            "HTTP.",
        ),
        "deploy": CommandPlace(
            "deploy",
            "deploy",
            "Let a gateway serve another model: its hash is compared, the weights are swapped, and tried.",
        ),
        "export": CommandPlace(
            "export", "export", "Export a trained model as a Hugging Face folder, with its tools, sampling and a card."
        ),
    },
    "Look": {
        "show": CommandPlace(
            "show",
            "show",
            "Show a run by its records: its steps and what became of each conversation; or one step, group "
            "or conversation.",
        ),
        "view": CommandPlace(
            "view", "view", "Show a run's conversations in a browser: token by token, group by group, step by step."
        ),
        "explain": CommandPlace(
            "explain",
            "explain",
            "Say what a run's records show: symptoms with numbers, examples and what to do, what matters most first.",
        ),
        "verify": CommandPlace(
            "verify",
            "verify",
            "Verify recorded conversations against what the engine returned. Print one line for each violation.",
        ),
        "replay": CommandPlace(
            "replay",
            "replay",
            "Make recorded conversations again with today's code, and name each difference: request, turn, "
            "field, token.",
        ),
        "convert": CommandPlace("convert", "convert", "Convert a run's records into what other programs read."),
        "sessions": CommandPlace(
            "sessions", "sessions_app", "Sessions that a gateway recorded: forget those of a user."
        ),
    },
    "Evaluate": {
        "probe": CommandPlace(
            "probe",
            "probe",
            "Say whether reinforcement learning can begin with a model, by its conversations on a recipe's "
            "training rows.",
        ),
        "eval": CommandPlace(
            "eval",
            "evaluate",
            "Evaluate models on a recipe's rows as its training would: settings, tools, users, agents and "
            "rewards are its own.",
        ),
        "compare": CommandPlace(
            "compare",
            "compare",
            "Compare models by their evaluations of the same rows: row by row, with an interval, p, and the "
            "rows that flipped.",
        ),
        "rows": CommandPlace("rows", "rows_app", "Rows of a data set: keep those that fit a model."),
    },
}
"""The commands by name, in groups by when one needs them, in the order of the help."""
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}
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
    "setup": "install",
    "version": "--version",
}
"""Names that other programs have for our commands."""


class Commands(TyperGroup):
    """The commands. A name that is none is refused with the one that was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for group, places in GROUPS.items():  # for the help and a shell's completion
            for name, place in places.items():
                self.add_command(TyperCommand(name, help=place.help, rich_help_panel=group))

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # typer's own types are private
        """Import the command that the words begin with, and return it."""
        name = args[0] if args else ""
        if name and name not in self.commands:
            hint = f"did you mean {_OTHERS[name]!r}?" if name in _OTHERS else did_you_mean(name, self.commands)
            ctx.fail(f"no command {name!r}; {hint or 'verl-multiturn -h lists all'}")
        if name:
            self.add_command(command_of(name))
        return super().resolve_command(ctx, args)


def command_of(name: str) -> Any:
    """Import a command's module, and return the command as click knows it; for `Commands` and for tests.

    Args:
        name: A name of `COMMANDS`.
    """
    place = COMMANDS[name]
    found = getattr(importlib.import_module(f"verl_multiturn.cli.{place.module}"), place.name)
    if not isinstance(found, typer.Typer):
        one = typer.Typer(add_completion=False)
        one.command(name)(found)
        found = one
    command = typer.main.get_command(found)
    command.name = name
    return command
