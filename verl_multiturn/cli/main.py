"""The command line `verl-multiturn`, and most of its commands.

Exit statuses: 0, all is well; 1, what was asked for was tried and failed, or a check found something; 2, what was asked
for cannot be done: a word of the command line, a file that it names or a setting is wrong; 130, interrupted.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn import __version__
from verl_multiturn.chat.template_rules import refusals
from verl_multiturn.cli.commands import Commands
from verl_multiturn.cli.compare import compare
from verl_multiturn.cli.convert import convert
from verl_multiturn.cli.corpus import index, retrieval_server
from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.cli.eval import evaluate
from verl_multiturn.cli.explain import explain
from verl_multiturn.cli.export import export
from verl_multiturn.cli.probe import probe
from verl_multiturn.cli.recipe import recipes_app
from verl_multiturn.cli.replay import replay
from verl_multiturn.cli.rows import rows_app
from verl_multiturn.cli.run import run
from verl_multiturn.cli.serve import serve
from verl_multiturn.cli.show import show
from verl_multiturn.cli.view import view
from verl_multiturn.describe import one_line
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.interactions.check.contract import (
    examine_interaction,
    interactions_to_check,
    read_actions,
)
from verl_multiturn.interactions.check.tool_world import load_world
from verl_multiturn.interactions.running.registry import check_row, load_interactions
from verl_multiturn.observe.doctor import Finding
from verl_multiturn.observe.doctor import examine as examine_environment
from verl_multiturn.observe.first_run import run_whole_path
from verl_multiturn.paths import word_at_home
from verl_multiturn.records.verified_files import verify_files
from verl_multiturn.row_files import read_rows
from verl_multiturn.row_scores import check_agent_name, check_scored
from verl_multiturn.tools.check.alike import gather_alike
from verl_multiturn.tools.check.contract import examine, tools_to_check
from verl_multiturn.tools.check.data_rows import SUFFIXES, RowCheck, validate_dataset
from verl_multiturn.tools.check.examination import CheckResult, Grade
from verl_multiturn.tools.loading.registry import load_tools
from verl_multiturn.trust.files import require_plain_folder
from verl_multiturn.trust.rule import import_from_here
from verl_multiturn.verl_bridge.names import LOOPS_OF_VERL, OUR_LOOPS, PROXY_LOOP, RECORDED_LOOP

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=Commands, no_args_is_help=True, context_settings=_HELP)
app.add_typer(recipes_app, name="recipe")
app.add_typer(rows_app, name="rows")
for command in (show, view, compare, probe, explain, replay, convert, export, serve, index, retrieval_server):
    app.command()(command)
app.command("eval")(evaluate)
app.command()(run)
console = Console()
_DAY_S = 86_400.0
_MOST_LINES = 20
"""Kinds of problems of a data set that are printed."""
_READING = frozenset({
    "show", "view", "compare", "explain", "convert", "verify", "export", "rows", "index", "doctor", "recipe",
    "retrieval-server", "",
})  # fmt: skip
"""Commands that import nothing that a user names; `--tools` does."""
_TRUSTING = frozenset({"replay", "eval", "probe"})
"""Commands that import what a folder names, once it is the user's own or trusted (`import_from_here`)."""
_NO_STACK = "--model needs verl and transformers ({error}); run it in the environment that trains"


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


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option("--model", help="A model's folder, or its name in Hugging Face's cache.")
    ] = None,
    tool_format: Annotated[str, typer.Option("--format", help="What `multi_turn.format` is set to.")] = "hermes",
    tools: Annotated[bool, typer.Option(help="Whether the run calls tools.")] = True,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Look at what a GPU needs, and train a tiny model on it for two steps.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the run of --gpu.")] = Path("outputs/doctor"),
) -> None:
    """Show which versions and which platform are here, what is missing and what to do about it.

    With --model: which rules of multi-turn training the model's chat template keeps. With --gpu: whether this machine's
    GPU can train.
    """
    if model is not None:
        _examine(model, tool_format, tools)
        return
    _report("doctor", examine_environment(gpu))
    if gpu:
        console.print(f"training a tiny model for two steps, in {out.resolve()}; some minutes", soft_wrap=True)
        _report("two steps of GRPO with a tool", run_whole_path(out.resolve(), "nvidia", print))


def _report(title: str, findings: list[Finding]) -> None:
    """Print a table of findings. If some are bad, end the program with their names."""
    table = Table("", "what", title=title)
    for column in ("found", "remedy"):
        table.add_column(column, overflow="fold")  # nobody can run a command that was cut
    for finding in findings:
        mark = ("[yellow]ok?[/]" if finding.remedy else "[green]ok[/]") if finding.ok else "[red]no[/]"
        table.add_row(mark, escape(finding.what), escape(finding.found), escape(finding.remedy))
    console.print(table)
    if bad := [finding.what for finding in findings if not finding.ok]:
        fail(f"{title}: not well: {', '.join(bad)}")


_VERDICTS = {"kept": "[green]kept[/]", "known": "[yellow]known[/]", "refused": "[red]refused[/]"}


def _examine(model: str, tool_format: str, tools: bool) -> None:
    try:
        require_plain_folder(Path(model))
        from verl_multiturn.verl_bridge.model.chat_setup import examine_model

        rules = examine_model(model, tool_format, tools)
    except MultiTurnError as error:
        refuse(error)
    except ImportError as error:
        fail(_NO_STACK.format(error=error))
    table = Table("", "rule", "found", title=f"chat template of {model}")
    for rule in rules:
        table.add_row(_VERDICTS[rule.verdict], rule.name, escape(rule.found))
    console.print(table)
    if refused := refusals(rules):
        fail(refused)


@app.command()
def validate(
    tool_config: Annotated[Path | None, typer.Argument(help="The tool YAML that `tool_config_path` names.")] = None,
    interaction_config: Annotated[
        Path | None,
        typer.Option("--interactions", help="The interaction YAML that `interaction_config_path` names."),
    ] = None,
    dataset: Annotated[
        list[Path] | None, typer.Option("--dataset", help="A parquet or JSONL file; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Count prompts with this model's tokenizer.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="`data.max_prompt_length` of the run.")] = 1024,
    tool_format: Annotated[str, typer.Option("--format", help="What `multi_turn.format` is set to.")] = "hermes",
    no_scores: Annotated[
        bool, typer.Option("--no-scores", help="Tools, users or a manager of your own score the rows.")
    ] = False,
) -> None:
    """Check a tool YAML, an interaction YAML, or both, and, if given, data sets.

    The checks: the classes, the tools' schemas, that each row's kwargs fit the tools and its interaction, that it can
    be scored and has an agent loop and, with --model, that its prompt fits.
    """
    try:
        if tool_config is None and interaction_config is None:
            raise ConfigError("nothing to validate; name a tool YAML, --interactions YAML, or both")
        tools = {} if tool_config is None else load_tools(tool_config)
        interactions = {} if interaction_config is None else load_interactions(interaction_config)
    except MultiTurnError as error:
        refuse(error)
    loaded = [("tool", name, tool) for name, tool in tools.items()]
    loaded += [("interaction", name, getattr(made, "old", made)) for name, made in interactions.items()]
    for kind, name, made in loaded:
        console.print(f"[green]ok[/] {kind} {name}: {type(made).__module__}.{type(made).__qualname__}", highlight=False)

    checks: list[RowCheck] = [
        partial(check_row, interactions=interactions),
        partial(check_agent_name, known=OUR_LOOPS | LOOPS_OF_VERL),
    ]
    if not no_scores:
        checks.append(_check_scored)
    measure = None
    if model is not None:
        try:
            require_plain_folder(Path(model))
            from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure

            measure = PromptMeasure(model, tools, tool_format, interactions)
        except MultiTurnError as error:
            refuse(error)
        except ImportError as error:
            fail(_NO_STACK.format(error=error))
    for path in dataset or []:
        try:
            rows, problems = validate_dataset(path, tools, measure, prompt_length, checks)
        except MultiTurnError as error:
            refuse(error)
        if problems:
            lines = gather_alike(problems)
            for line in lines[:_MOST_LINES]:
                console.print(f"[red]error[/] {escape(f'{path}: {line}')}", highlight=False, soft_wrap=True)
            if len(lines) > _MOST_LINES:
                console.print(f"[red]error[/] … and {len(lines) - _MOST_LINES} more", highlight=False)
            fail(f"{path}: {len(problems)} of {rows} rows cannot work")
        console.print(f"[green]ok[/] {escape(str(path))}: {rows} rows", highlight=False, soft_wrap=True)
    if measure is not None and measure.reasoning_left_out:
        console.print(
            f"[yellow]ok?[/] the chat template leaves the reasoning of {measure.reasoning_left_out} earlier messages "
            "out of the prompts, as it does with the model's own (docs/train/templates.md)",
            highlight=False,
            soft_wrap=True,
        )


def _check_scored(row: Mapping[str, Any], *, where: str) -> None:
    places = [row, extra_info if isinstance(extra_info := row.get("extra_info"), Mapping) else {}]
    has_user = any(place.get("interaction_kwargs") for place in places)
    # An agent gives the reward itself, and an interaction may.
    if not has_user and row.get("agent_name") not in (PROXY_LOOP, RECORDED_LOOP):
        check_scored(row, where=where)


_CHECKED = {
    Grade.OK: "[green]ok[/]",
    Grade.WARNING: "[yellow]warning[/]",
    Grade.PROBLEM: "[red]problem[/]",
    Grade.SKIPPED: "[dim]skipped[/]",
}


@app.command("check-tool")
def check_tools(
    target: Annotated[str, typer.Argument(help="A class or function as package.module.name, or a tool YAML.")],
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
            read_rows(dataset, SUFFIXES)  # a file that cannot be read is no fault of the tool
        for tool in tools_to_check(target, _json(config), tool_config, name):
            kwargs = {"create_kwargs": create, "execute_kwargs": execute}
            world = load_world(interaction, _json(interaction_kwargs) or {}, timeout_s) if interaction else None
            findings = examine(tool, arguments=example, timeout_s=timeout_s, world=world, dataset=dataset, **kwargs)
            problems += _show_findings(f"tool {tool.name}", findings)
    except MultiTurnError as error:
        refuse(error)
    if problems:
        fail(f"{target}: {problems} problem(s)")


@app.command("check-interaction")
def check_interactions(
    target: Annotated[
        str, typer.Argument(help="A class as package.module.Class, or an interaction YAML; FILE:NAME for one of its.")
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
            problems += _show_findings(f"interaction {interaction.name}", examine_interaction(interaction, **given))
    except MultiTurnError as error:
        refuse(error)
    if problems:
        fail(f"{target}: {problems} problem(s)")


def _show_findings(title: str, findings: list[CheckResult]) -> int:
    """Print a table of findings, and return the number of problems."""
    table = Table("", "check", title=title)
    for column in ("found", "what to do"):
        table.add_column(column, overflow="fold")  # long names, such as those of errors, are not cut
    for finding in findings:
        table.add_row(_CHECKED[finding.verdict], finding.check, escape(finding.found), escape(finding.remedy))
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


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Records that `record_dir` wrote; a folder: all in it.")],
) -> None:
    """Verify recorded conversations against what the engine returned. Print one line for each violation.

    The last line is a JSON object.
    """
    records = tokens = violations = torn = damaged = repeated = 0
    try:
        for path, place, verified, problem, _, is_torn, is_repeated in verify_files(files):
            if verified is None:
                torn, repeated = torn + is_torn, repeated + is_repeated
                damaged += not (is_torn or is_repeated)
                said = one_line(f"{path}:{place}: not verified: {problem}")
                console.print(said, highlight=False, markup=False, soft_wrap=True)
                continue
            records += 1
            tokens += verified.sampled_tokens
            violations += len(verified.violations)
            for violation in verified.violations:
                said = one_line(f"{path}:{place}: {violation}")
                console.print(said, highlight=False, markup=False, soft_wrap=True)
    except MultiTurnError as error:
        refuse(error)
    summary = f"{records} records, {tokens} sampled tokens, {violations} violations"
    summary += f", {torn} torn" if torn else ""
    summary += f", {damaged} damaged stretches" if damaged else ""
    summary += f", {repeated} repeated" if repeated else ""
    bad = violations or damaged or repeated
    console.print(f"[red]error[/] {summary}" if bad else f"[green]ok[/] {summary}", highlight=False)
    told = {"records": records, "sampled_tokens": tokens, "violations": violations, "torn": torn, "damaged": damaged}
    told |= {"repeated": repeated}
    print(json.dumps(told))
    if bad:
        raise typer.Exit(1)


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
        import_from_here()
    sys.argv[1:] = map(word_at_home, sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter ends no command
            stream.reconfigure(errors="backslashreplace")
    app()
