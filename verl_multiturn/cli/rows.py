"""`verl-multiturn rows`: rows of a data set by a model's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import refuse
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.evaluation.results import Results, read_results
from verl_multiturn.evaluation.row_choice import Condition, RowChoice, keep_rows, summary_of_choice

rows_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Rows of a data set: keep those that fit a model."
)
_RARE = 0.05


@rows_app.callback()
def rows() -> None:
    """Rows of a data set: keep those that fit a model."""


@rows_app.command("keep")
def keep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The rows that were evaluated: *.parquet or *.jsonl.")],
    evaluation: Annotated[Path, typer.Option("--eval", help="The evaluation's folder.")],
    where: Annotated[
        str, typer.Option(help="What a row must hold: comparisons of rate, n and right, joined by and / or.")
    ],
    to: Annotated[Path, typer.Option(help="The new file, of the same kind.")],
) -> None:
    """Keep the rows that a model solves as often as requested: with '0 < rate < 1' those whose groups have a signal.

    `n` is the number of a row's conversations that have a reward, `right` how many of them solved the task, `rate` the
    share. Rows that changed since the evaluation are refused. The last line is a JSON object.
    """
    try:
        condition = Condition(where)
        results = read_results(evaluation)
        choice = keep_rows(file, results, condition, to)
    except MultiTurnError as error:
        refuse(error)
    for line in _said(choice, results):
        print(line)
    print(json.dumps(summary_of_choice(choice, results, condition)))


def _said(choice: RowChoice, results: Results) -> list[str]:
    """Return the omitted rows, and how sure that is."""
    model, samples = results.evaluation.model, results.evaluation.samples
    lines = [f"kept {len(choice.kept)} of {choice.rows} rows, by what {model.path} ({model.hash}) made of them"]
    lines += [
        f"left out {count} rows that were right {right} of {n} times" for (right, n), count in choice.left_out.items()
    ]
    if choice.unjudged:
        lines.append(f"left out {choice.unjudged} rows without a conversation that has a reward")
    if choice.unknown:
        lines.append(f"left out {choice.unknown} rows that were not evaluated")
    never = (1 - _RARE) ** samples
    lines.append(
        f"of {samples} samples a row that is right once in {1 / _RARE:.0f} times is never right in {never:.0%}"
    )
    return lines
