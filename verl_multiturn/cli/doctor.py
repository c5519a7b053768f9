"""`verl-multiturn doctor`: versions, platform, chat templates, and a short training on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.chat.template_rules import refusals
from verl_multiturn.cli.ends import NAME_A_MODEL, NO_STACK, fail, refuse
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.runs.doctor import DoctorFinding
from verl_multiturn.runs.doctor import examine as examine_environment
from verl_multiturn.runs.first_run import run_whole_path
from verl_multiturn.runs.package_entries import examine_packages
from verl_multiturn.trust.files import require_plain_folder

console = Console()


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
    """Show which versions, platform and entry points are here, what is missing and what to do about it.

    With --model: which rules of multi-turn training the model's chat template keeps. With --gpu: whether this machine's
    GPU can train.
    """
    if model is not None:
        _examine(model, tool_format, tools)
        return
    _report("doctor", [*examine_environment(gpu), *examine_packages()])
    if gpu:
        console.print(f"training a tiny model for two steps, in {out.resolve()}; some minutes", soft_wrap=True)
        _report("two steps of GRPO with a tool", run_whole_path(out.resolve(), "nvidia", print))


def _report(title: str, findings: list[DoctorFinding]) -> None:
    """Print a table of findings. If some are bad, end the program with their names."""
    table = Table("", "what", title=title)
    for column in ("found", "remedy"):
        table.add_column(column, overflow="fold")  # a command that was cut cannot be run
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
        from verl_multiturn.verl_bridge.model.loading import load_model

        rules = examine_model(load_model({"path": model}, NAME_A_MODEL), tool_format, tools)
    except MultiTurnError as error:
        refuse(error)
    except ImportError as error:
        fail(NO_STACK.format(error=error))
    table = Table("", "rule", "found", title=f"chat template of {model}")
    for rule in rules:
        table.add_row(_VERDICTS[rule.verdict], rule.name, escape(rule.found))
    console.print(table)
    if refused := refusals(rules):
        fail(refused)
