"""The command line `verl-multiturn`. Each command lies in a module of its own, which `commands.py` names.

Exit statuses: 0, all is well; 1, the request was tried and failed, or a check found something; 2, the request cannot be
done: a word of the command line, a file that it names or a setting is wrong; 130, interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from verl_multiturn import __version__
from verl_multiturn.cli.commands import Commands
from verl_multiturn.paths import word_at_home

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=Commands, no_args_is_help=True, context_settings=_HELP)
_READING = frozenset({
    "show", "view", "compare", "explain", "convert", "verify", "export", "rows", "index", "doctor", "recipe",
    "install", "retrieval-server", "sessions", "",
})  # fmt: skip
"""Commands that import nothing that a user names; `--tools` does."""
_TRUSTING = frozenset({"replay", "eval", "probe", "gateway"})
"""Commands that import code that a folder names, once it is the user's own or trusted (`import_from_here`)."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"verl-multiturn {__version__}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Multi-turn tool rollouts for verl."""


def main() -> None:
    """Run the command line, as the console script does.

    As with `python -m`, a command can name modules of the current folder. Commands that only read somebody's folder
    name none, and it may be the current one, so that they import nothing from there.
    """
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    names_modules = command not in _READING or any(word.partition("=")[0] == "--tools" for word in sys.argv[1:])
    try:
        os.getcwd()
    except FileNotFoundError:
        message = "the current folder was deleted; change into one that is there, such as with `cd ~`"
        print(f"verl-multiturn: {message}", file=sys.stderr)
        sys.exit(2)
    if names_modules and command not in _TRUSTING:
        from verl_multiturn.trust.rule import import_from_here

        import_from_here()
    sys.argv[1:] = map(word_at_home, sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter ends no command
            stream.reconfigure(errors="backslashreplace")
    app()
