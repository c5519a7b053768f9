"""`verl-multiturn compare`: evaluations of the same rows, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import refuse, wide_console
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.evaluation.compare import compare as compare_results
from verl_multiturn.evaluation.compare import comparison_summary, comparison_table
from verl_multiturn.evaluation.results import read_results


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR DIR…", help="Folders of evaluations; each is compared with the first.")
    ],
) -> None:
    """Compare models by their evaluations of the same rows: row by row, with an interval, p, and the rows that flipped.

    Other rows and other rewards are refused. The last line is a JSON object.
    """
    try:
        if len(folders) < 2:
            raise ConfigError(f"{str(folders[0])!r} alone cannot be compared; name two folders of evaluations or more")
        first, *others = (read_results(folder) for folder in folders)
        made = [compare_results(first, other) for other in others]
    except MultiTurnError as error:
        refuse(error)
    console = wide_console()
    for comparison in made:
        console.print(comparison_table(comparison), highlight=False)
    print(json.dumps({"comparisons": [comparison_summary(comparison) for comparison in made]}))
