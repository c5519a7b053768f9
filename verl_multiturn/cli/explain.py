"""`verl-multiturn explain`: reports the findings from a run's records, the most important first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.cli.ends import open_records, refuse
from verl_multiturn.describe import printable
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.observe.explain.explanation import explain as explain_run
from verl_multiturn.observe.explain.finding import SYMPTOMS, Finding
from verl_multiturn.observe.show.terminal import short_id

_MARKS = {"alarm": "[red]alarm[/]", "note": "[yellow]note[/]", "unknown": "[dim]unknown[/]"}


def explain(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its folder of records.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the evidence of each finding, and nothing else.")
    ] = False,
) -> None:
    """Say what a run's records show: symptoms with numbers, examples and what to do, what matters most first.

    An alarm asks for something to be done; a note may be as it should. `unknown`: the data for a symptom was not
    recorded. The last line is a JSON object. With an alarm the exit status is 1.
    """
    try:
        records = open_records(folder)
        findings = explain_run(records)
    except MultiTurnError as error:
        refuse(error)
    counts = {kind: sum(each.kind == kind for each in findings) for kind in _MARKS}
    if as_json:
        print(json.dumps({"findings": [each.as_json() for each in findings], "faults": records.faults, **counts}))
    else:
        _show(findings, records.faults)
        print(json.dumps({**counts, "symptoms": [each.symptom for each in findings if each.kind == "alarm"]}))
    if counts["alarm"]:
        raise typer.Exit(1)


def _show(findings: list[Finding], faults: list[str]) -> None:
    console = Console()
    table = Table("", "symptom", show_lines=True)
    for column in ("found", "what to do", "examples"):
        table.add_column(column, overflow="fold")
    for each in findings:
        if each.kind != "unknown":
            cells = (each.symptom, each.said, each.remedy, "\n".join(map(short_id, each.requests)))
            table.add_row(_MARKS[each.kind], *(escape(printable(cell)) for cell in cells))
    if table.row_count:
        console.print(table)
    elif len({each.symptom for each in findings}) < len(SYMPTOMS):  # all others were looked for
        console.print("no symptom was found in what was recorded")
    for each in findings:
        if each.kind == "unknown":
            console.print(
                f"unknown: {each.symptom}: {printable(each.said)}", markup=False, highlight=False, soft_wrap=True
            )
    for fault in faults:
        console.print(f"not read: {printable(fault)}", markup=False, highlight=False, soft_wrap=True)
