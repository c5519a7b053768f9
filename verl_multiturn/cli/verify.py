"""`verl-multiturn verify`: recorded conversations against the engine's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_multiturn.cli.ends import refuse
from verl_multiturn.describe import one_line
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.records.verify.folder import verify_files

console = Console()


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
