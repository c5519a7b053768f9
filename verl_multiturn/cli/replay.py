"""`verl-multiturn replay`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.observe.show.terminal import clean


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its folder of records.")],
    requests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUEST]…",
            help="Replay the conversations with these request ids, or ones that begin so; else all.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: replay with a changed setting; repeatable."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Run the tools and interactions again.")] = False,
    scores: Annotated[bool, typer.Option(help="Whether rewards are computed again.")] = True,
) -> None:
    """Make recorded conversations again with today's code, and name each difference: request, turn, field, token.

    With --set: from which turn on the model would have seen something else. The last line is a JSON object.
    """
    try:
        pairs = [_pair(change) for change in changes or []]
        try:
            from verl_multiturn.verl_bridge.replay.command import replay_folder
        except ImportError as error:
            fail(f"a replay needs verl and transformers ({error}); run it in the environment that trains", status=2)
        replaying = replay_folder(
            folder, _say, requests=requests or (), changes=pairs, is_live=live, with_scores=scores
        )
        found = asyncio.run(replaying)
    except MultiTurnError as error:
        refuse(error)
    print(json.dumps(found))
    if found["different"] and not pairs:
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(clean(line).replace("\n", "\\n"))


def _pair(change: str) -> tuple[str, str]:
    key, sign, value = change.partition("=")
    if not (key and sign):
        raise ConfigError(f"--set {change}: expected KEY=VALUE, as in custom.multiturn.turn_length=64")
    return key, value
