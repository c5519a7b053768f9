"""`verl-multiturn show`: a run, a step, a group or a conversation of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import open_records, refuse, wide_console
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.observe.show.documents import ShowDocuments, summed
from verl_multiturn.observe.show.terminal import as_json, print_document


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, its folder of records, or a file.")],
    request: Annotated[
        str | None, typer.Argument(help="Show the conversation with this request id, or one that begins so.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Show this step, and the validation after it.")] = None,
    group: Annotated[str | None, typer.Option(help="Show the group of this uid, or of one that begins so.")] = None,
    for_programs: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with everything that is known.")
    ] = False,
) -> None:
    """Show a run by its records: its steps and what became of each conversation; or one step, group or conversation.

    The last line is a JSON object.
    """
    try:
        if sum(each is not None for each in (request, step, group)) > 1:
            raise ConfigError("REQUEST, --step and --group name different things; give one of them")
        open_records(folder)
        shown = ShowDocuments(folder)
        if request is not None:
            document = shown.conversation(request)
        elif step is not None:
            document = shown.step(step)
        else:
            document = shown.run() if group is None else shown.group(group)
    except MultiTurnError as error:
        refuse(error)
    if for_programs:
        print(as_json(document))
    else:
        print_document(document, wide_console())
        print(as_json(summed(document)))
