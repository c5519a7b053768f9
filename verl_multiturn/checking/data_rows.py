"""Check before a run: the rows of a data set against the tools of a YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl_multiturn.chat.messages import read_messages
from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.files import read_rows
from verl_multiturn.tools.loading.kwargs import read_tools_kwargs, tools_of_row

# The files that verl's data set reads.
SUFFIXES = (".parquet", ".jsonl", ".json")


class RowCheck(Protocol):
    """A further check of a row."""

    def __call__(self, row: Mapping[str, Any], *, where: str) -> object:
        """Raise a ConfigError that begins with `where` for a row that cannot work."""


def validate_dataset(
    path: Path,
    tools: Mapping[str, Any],
    measure: Callable[[Mapping[str, Any]], int] | None = None,
    prompt_length: int = 0,
    checks: Sequence[RowCheck] = (),
) -> tuple[int, list[str]]:
    """Check every row of a data set against the tools of a run.

    Args:
        path: A `.parquet`, `.jsonl` or `.json` file.
        tools: The tools of the run, by name.
        measure: Returns the number of tokens in a row's prompt; None: tokens are not counted.
        prompt_length: Largest number of tokens in a prompt; used with `measure` only.
        checks: Further checks of a row, for example of the interaction that it chooses.

    Returns:
        The number of rows, and one message for each row that cannot work.

    Raises:
        ConfigError: The file cannot be read, or has no rows.
    """
    if path.suffix == ".csv":
        raise ConfigError(
            f"{str(path)!r}: verl's data set reads no CSV; `verl-multiturn run RECIPE --data {path} --prepare` makes "
            "rows of it: name the train.parquet in the folder `data` of that run"
        )
    rows = read_rows(path, SUFFIXES)
    if not rows:
        raise ConfigError(f"{str(path)!r} has no rows; write some")
    # A run's reader of the file gives each row the columns of all.
    named = [row for row in rows if isinstance(row, Mapping)]
    loops = {"agent_name": None} if any("agent_name" in row for row in named) else {}
    problems = []
    for index, each in enumerate(rows):
        row = {**loops, **each} if isinstance(each, Mapping) else each
        problem = _row_problem(row, f"row {index}", tools, checks)
        if problem is None and measure is not None:
            problem = _length_problem(row, f"row {index}", measure, prompt_length)
        if problem:
            problems.append(problem)
    return len(rows), problems


def _length_problem(
    row: Mapping[str, Any], where: str, measure: Callable[[Mapping[str, Any]], int], prompt_length: int
) -> str | None:
    try:
        tokens = measure(row)
    except ConfigError as error:
        return f"{where}: {error}"
    if tokens <= prompt_length:
        return None
    return f"{where}: the prompt has {tokens} tokens with its tools' schemas, and may have {prompt_length}"


def _row_problem(row: Any, where: str, tools: Mapping[str, Any], checks: Sequence[RowCheck]) -> str | None:
    if not isinstance(row, Mapping):
        return f"{where}: expected a mapping, got {row!r:.200}"
    extra_info = row.get("extra_info")
    in_extra_info = extra_info.get("tools_kwargs") if isinstance(extra_info, Mapping) else None
    try:
        beside = read_tools_kwargs(row.get("tools_kwargs"), where)
        if beside and beside != read_tools_kwargs(in_extra_info, where):
            return f"{where}: a column tools_kwargs, and verl reads extra_info.tools_kwargs alone; put them there"
        tools_of_row(row, tools, where)
        read_messages(row.get("prompt"), where)
        for check in checks:
            check(row, where=where)
    except ConfigError as error:
        return str(error)
    return None
