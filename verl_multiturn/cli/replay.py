"""`verl-multiturn replay`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.observe.show.terminal import clean
from verl_multiturn.records.read.records import Records
from verl_multiturn.tools.loading.registry import KINDS
from verl_multiturn.trust.rule import TRUST_HELP, import_from_here, require_trust

_MODEL = "actor_rollout_ref.model"
_NAMED = (
    (f"{_MODEL}.path", "the tokenizer of"),
    (f"{_MODEL}.tokenizer_path", "the tokenizer of"),
    (f"{_MODEL}.trust_remote_code", "the model's own Python files"),
    ("reward.custom_reward_function.path", "the reward of"),
    ("custom_reward_function.path", "the reward of"),
    ("data.custom_cls.path", "the data set of"),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "the tools of"),
    ("actor_rollout_ref.rollout.multi_turn.function_tool_path", "the tools of"),
    ("actor_rollout_ref.rollout.custom.multiturn.proxy.select", "the function"),
)
"""Settings of a run that name code and addresses."""
_CODE = KINDS
"""Keys of a tool or an interaction that name code, a command or an address."""


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
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
) -> None:
    """Make recorded conversations again with today's code, and name each difference: request, turn, field, token.

    With --set: from which turn on the model would have seen something else. The last line is a JSON object.
    """
    try:
        pairs = [_pair(change) for change in changes or []]
        require_trust(folder, "replay", list(dict.fromkeys(_uses(Records(folder).require().runs))), trust)
        try:
            import_from_here(folder, is_trusted=trust)
            from verl_multiturn.verl_bridge.offline.replay.command import replay_folder
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


def _uses(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the code, commands and files that the files of runs name and a replay would use."""
    for run in runs:
        settings = run.get("settings")
        for path, what in _NAMED:
            value: Any = settings
            for key in path.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value:
                yield what if value is True else f"{what} {show(value)}"
        for entry in (*_entries(run.get("tools"), "tools"), *_entries(run.get("interactions"), "interaction")):
            for key in _CODE:
                if entry.get(key):
                    yield f"the {key.replace('_', ' ')} {show(entry[key])}"
    yield "the tokenizer of its settings"


def _entries(yaml_file: Any, key: str) -> list[Mapping[str, Any]]:
    entries = yaml_file.get(key) if isinstance(yaml_file, Mapping) else None
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _say(line: str) -> None:
    print(clean(line).replace("\n", "\\n"))


def _pair(change: str) -> tuple[str, str]:
    key, sign, value = change.partition("=")
    if not (key and sign):
        raise ConfigError(f"--set {change}: expected KEY=VALUE, as in custom.multiturn.turn_length=64")
    return key, value
