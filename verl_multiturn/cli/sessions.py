"""`verl-multiturn sessions`: the sessions that a gateway has recorded."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.describe import one_line
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.models.hash import model_hash
from verl_multiturn.records.read.files import folder_of
from verl_multiturn.records.read.lineage import LearnedModel, models_that_learned
from verl_multiturn.records.write.forgetting import Forgotten, forget_user

sessions_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Sessions that a gateway recorded: forget those of a user."
)


@sessions_app.callback()
def sessions() -> None:
    """Sessions that a gateway recorded: forget those of a user."""


@sessions_app.command("forget")
def forget(
    user: Annotated[str, typer.Option(help="The user, as the sessions were started with.")],
    records: Annotated[Path, typer.Option(help="Folder of the gateway's records; the gateway must not run.")],
    models: Annotated[
        list[Path] | None, typer.Option(help="Folders of trainings: those that learned from the sessions are named.")
    ] = None,
) -> None:
    """Remove every trace of a user's sessions from a gateway's records, and name the models that learned from them.

    Records, lines, joins, rewards, snapshots and the index go; the weights of a model that learned from them remain. A
    command that was cut off is finished by the same command, which names the models of all of its sessions. The last
    line is a JSON object. Exit status 1: files that are not the gateway's name a session.
    """
    try:
        if not user:
            raise ConfigError("--user is empty; name a user, as the sessions were started with")
        if not records.is_dir():
            raise ConfigError(f"{str(records)!r} is no folder; name the folder of a gateway's records")
        folder = folder_of(records)
        models_that_learned(models or [], ())  # a wrong folder is refused before anything is removed
        # Printed before the ids of the sessions are given up: a kill in between must not lose the names of the models.
        found = forget_user(folder, user, partial(_print, folder, models or []))
    except MultiTurnError as error:
        refuse(error)
    except OSError as error:
        fail(f"a file cannot be read or written: {error}; repeat the command, which goes on")
    if found.elsewhere:
        raise typer.Exit(1)


def _print(folder: Path, models: list[Path], found: Forgotten) -> None:
    """Print what was removed and the models that learned from it, to the end.

    Raises:
        ConfigError: The lineage of a training cannot be read.
    """
    learned = models_that_learned([folder, *models], found.sessions)
    for each in learned:
        print(one_line(f"{each.folder} learned from {each.sessions} of these sessions ({each.rows} rows)"))
        for place, name in _weights(each.folder).items():
            print(one_line(f"  its weights {name}: {place}"))
    for name in found.elsewhere:
        print(one_line(f"{folder / name} names a session, and is no file of a gateway; remove it yourself"))
    if not found.sessions:
        print(one_line(f"no session in {folder} was started with this user; nothing was removed"))
    print(json.dumps(_told(found, learned)), flush=True)


def _weights(folder: Path) -> dict[str, str]:
    """Return the hashes of the models that lie in the folder of a training, by their folders."""
    found = {}
    for place in sorted({path.parent for path in folder.rglob("*.safetensors")}):
        with suppress(ConfigError):  # half of a model, as a training under way leaves it
            found[str(place)] = model_hash(place)
    return found


def _told(found: Forgotten, learned: list[LearnedModel]) -> dict[str, Any]:
    counts = ("records", "lines", "session_lines", "rewards", "join_rows", "running", "indices", "unreadable")
    models = [
        {"folder": str(each.folder), "rows": each.rows, "sessions": each.sessions, "weights": _weights(each.folder)}
        for each in learned
    ]
    told = {"sessions": len(found.sessions)} | {name: getattr(found, name) for name in counts}
    return told | {"elsewhere": found.elsewhere, "models": models}
