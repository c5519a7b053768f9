"""Ends of commands that failed or were refused, with their exit status; and the console for tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from verl_multiturn.describe import printable
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.runs.start_up import end_of_log

if TYPE_CHECKING:
    from verl_multiturn.records.read.records import Records

NO_STACK = "--model needs verl and transformers ({error}); run it in the environment that trains"
NAME_A_MODEL = "name a folder with both, or a model in Hugging Face's cache"
_WIDTH = 160
"""Characters of a line that goes into a file or another program."""


def wide_console() -> Console:
    """Return a console for tables, which are not squeezed where the terminal's width is unknown."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def open_records(folder: Path) -> Records:
    """Return the records of a folder.

    Raises:
        ConfigError: There are none. If the folder is that of a run, the error has the run's progress.
    """
    from verl_multiturn.records.read.records import Records  # with pyarrow, which most commands do without

    try:
        return Records(folder).require()
    except ConfigError as error:
        log = folder / "train.log"
        if not log.is_file():
            raise
        raise ConfigError(f"{str(folder)!r} holds no records of conversations: {end_of_log(log)}") from error


def fail(message: str, status: int = 1) -> NoReturn:
    """End the program with a message on standard error, behind everything that was printed before."""
    sys.stdout.flush()  # in a pipe it would come after the message
    print(f"verl-multiturn: {printable(message)}", file=sys.stderr)
    raise typer.Exit(status)


def refuse(error: MultiTurnError) -> NoReturn:
    """End the program with status 2 and the error's text: the request cannot be fulfilled."""
    fail(str(error), status=2)
