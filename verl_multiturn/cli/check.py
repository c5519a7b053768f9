"""`verl-multiturn check-tool`, `check-interaction` and `check-advantage`: a user's code, called some hundred times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.advantages.estimators import ESTIMATORS
from verl_multiturn.advantages.function import function_of, load_function
from verl_multiturn.calls.loading.yaml_text import read_yaml
from verl_multiturn.checking.advantage_contract import TIMEOUT_S, check_advantage
from verl_multiturn.checking.advice import CLASS
from verl_multiturn.checking.data_rows import SUFFIXES
from verl_multiturn.checking.examination import CheckResult, Grade, examine
from verl_multiturn.checking.interaction_contract import check_interaction, interactions_to_check, read_actions
from verl_multiturn.checking.interaction_examination import ADVICE
from verl_multiturn.checking.tool_contract import check_tool, tools_to_check
from verl_multiturn.checking.tool_world import load_world
from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.rows.files import read_rows

console = Console()
_DAY_S = 86_400.0
_CHECKED = {
    Grade.OK: "[green]ok[/]",
    Grade.WARNING: "[yellow]warning[/]",
    Grade.PROBLEM: "[red]problem[/]",
    Grade.SKIPPED: "[dim]skipped[/]",
}


def check_tools(
    target: Annotated[
        str, typer.Argument(help="A class or function as package.module.name or package/name, or a tool YAML.")
    ],
    config: Annotated[str | None, typer.Option(help="The class's `config`, as JSON.")] = None,
    tool_config: Annotated[Path | None, typer.Option(help="The YAML whose entry of that class is taken.")] = None,
    name: Annotated[str | None, typer.Option("--tool", help="Only the tool of this name, of a YAML's tools.")] = None,
    arguments: Annotated[
        str | None, typer.Option(help="Arguments of an example call, as JSON; else they are guessed.")
    ] = None,
    create_kwargs: Annotated[str | None, typer.Option(help="Kwargs as a data row gives them, as JSON.")] = None,
    execute_kwargs: Annotated[str | None, typer.Option(help="Kwargs as a data row gives them, as JSON.")] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Data rows: two that differ for the tool are played at once; else made.")
    ] = None,
    interaction: Annotated[
        str | None,
        typer.Option(help="The interaction whose world the tools share: a class, FILE or FILE:NAME."),
    ] = None,
    interaction_kwargs: Annotated[str | None, typer.Option(help="A row's kwargs for --interaction, as JSON.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=_DAY_S, help="Seconds after which a call hangs (its `limits.timeout_s`, from 10 to 60)."
        ),
    ] = None,
) -> None:
    """Check a tool of your own. It is called some hundred times.

    The checks: lifecycle, return types, cancellation, what the tool leaves behind, isolation, many conversations at
    once, bad arguments.
    """
    problems = 0
    try:
        example, create, execute = _json(arguments), _json(create_kwargs), _json(execute_kwargs)
        if dataset is not None:
            read_rows(dataset, SUFFIXES)  # a file that cannot be read is not a fault of the tool
        for tool in tools_to_check(target, _json(config), tool_config, name):
            kwargs = {"create_kwargs": create, "execute_kwargs": execute}
            world = load_world(interaction, _json(interaction_kwargs) or {}, timeout_s) if interaction else None
            given = {"arguments": example, "timeout_s": timeout_s, "world": world, "dataset": dataset, **kwargs}
            findings = examine(check_tool, CLASS["row kwargs"], tool, **given)
            problems += _show_findings(f"tool {tool.name}", findings)
    except MultiTurnError as error:
        refuse(error)
    if problems:
        fail(f"{target}: {problems} problem(s)")


def check_interactions(
    target: Annotated[
        str,
        typer.Argument(
            help="A class as package.module.Class or package/name, or an interaction YAML; FILE:NAME for one of its."
        ),
    ],
    config: Annotated[str | None, typer.Option(help="The class's `config`, as JSON.")] = None,
    name: Annotated[
        str | None, typer.Option("--interaction", help="Only the interaction of this name, of a YAML's.")
    ] = None,
    kwargs: Annotated[str | None, typer.Option(help="Kwargs as a data row gives them, as JSON.")] = None,
    actions: Annotated[
        Path | None,
        typer.Option(
            help="A file with the player's turns, one a line; else they are drawn from `actions` of the "
            "config, or are letters."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Largest number of turns of an episode.")] = 8,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=_DAY_S, help="Seconds after which a call hangs (its `limits.timeout_s`, from 10 to 60)."
        ),
    ] = None,
) -> None:
    """Check a simulated user or an environment of your own. Some hundred conversations are played.

    The checks: lifecycle, return types, cancellation, what it leaves behind, whatever a model may write, and whether an
    episode stays the same when it is played again and beside others.
    """
    problems = 0
    try:
        row, turns = _json(kwargs), read_actions(actions)
        for interaction in interactions_to_check(target, _json(config), name):
            given = {"kwargs": row, "actions": turns, "rounds": rounds, "timeout_s": timeout_s}
            findings = examine(check_interaction, ADVICE["row kwargs"], interaction, **given)
            problems += _show_findings(f"interaction {interaction.name}", findings)
    except MultiTurnError as error:
        refuse(error)
    if problems:
        fail(f"{target}: {problems} problem(s)")


def check_advantages(
    target: Annotated[
        str,
        typer.Argument(
            help="As `algorithm.adv_estimator`: package.module:name, path/to/file.py:name, package/name, one of ours."
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(help="Options of the function, such as gamma=0.9.", metavar="KEY=VALUE")
    ] = None,
    options: Annotated[str | None, typer.Option(help="Options of the function, as JSON.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(help="A role that conversations have, for a function that knows these alone.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=_DAY_S, help="Seconds after which a call hangs.")
    ] = TIMEOUT_S,
) -> None:
    """Check a function of advantages of your own. It is called some hundred times.

    The checks, with groups that are made up: one sibling and 1,000, equal and huge rewards, sessions of agents, the
    order of siblings, state between calls, and whether a checkpoint holds it. It also reports whether values sum to 0.
    """
    try:
        given = {**(_json(options) or {}), **_options(words or [])}
        ours = ESTIMATORS.get(target)
        function = load_function(target, given) if ours is None else function_of(ours, given, target)
    except MultiTurnError as error:
        refuse(error)
    problems = _show_findings(f"advantages {target}", check_advantage(function, role or (), timeout_s))
    if problems:
        fail(f"{target}: {problems} problem(s)")


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options in words such as `gamma=0.9`, whose values are read as YAML."""
    made = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and key.isidentifier()):
            raise ConfigError(f"{word!r}: expected an option of the function, as in gamma=0.9")
        try:
            made[key] = read_yaml(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{word!r}: cannot read {value!r} as YAML ({describe(error)}); quote it for the shell"
            ) from None
    return made


def _show_findings(title: str, findings: list[CheckResult]) -> int:
    """Print a table of findings, each remedy on a line of its own, and return the number of problems."""
    table = Table("", "check and finding", title=title)
    table.columns[1].overflow = "fold"  # long names, such as those of errors, are not cut
    for finding in findings:
        told = "\n→ ".join(escape(text) for text in (finding.found, finding.remedy) if text)
        table.add_row(_CHECKED[finding.verdict], f"[bold]{finding.check}[/]" + (f": {told}" if told else ""))
    console.print(table)
    return sum(finding.verdict is Grade.PROBLEM for finding in findings)


def _json(text: str | None) -> Any:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no JSON ({error}); quote it for the shell") from None
    except RecursionError:
        raise ConfigError(f"{text[:20]!r}… is no JSON (it is nested too deeply)") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{text!r}: expected a JSON object, as in \'{{"query": "tea"}}\'')
    return value
