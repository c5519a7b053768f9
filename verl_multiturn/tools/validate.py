"""Checks before a run: the rows of a data set against the tools of a YAML file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.kwargs import bind_kwargs, read_tools_kwargs
from verl_multiturn.tools.registry import METHODS


def validate_dataset(
    path: Path,
    tools: Mapping[str, Any],
    measure: Callable[[Mapping[str, Any]], int] | None = None,
    prompt_length: int = 0,
) -> tuple[int, list[str]]:
    """Number of rows, and one message for each row that cannot work.

    Args:
        measure, prompt_length: counts the tokens of a row's prompt, and how many it may have; None: not counted.

    Raises:
        ConfigError: the file cannot be read.
    """
    rows = _read_rows(path)
    problems = []
    for index, row in enumerate(rows):
        problem = _row_problem(row, f"row {index}", tools)
        if problem is None and measure is not None:
            problem = _length_problem(row, f"row {index}", measure, prompt_length)
        if problem:
            problems.append(problem)
    return len(rows), problems


def _read_rows(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is no file; give a parquet or JSONL file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(path).to_pylist())
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError(f"{str(path)!r}: expected a .parquet or .jsonl file")
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON in every line: {error}") from None


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


def _row_problem(row: Any, where: str, tools: Mapping[str, Any]) -> str | None:
    if not isinstance(row, Mapping):
        return f"{where}: expected a mapping, got {row!r:.200}"
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return f"{where}: 'prompt' must be a non-empty list of messages with a role, got {prompt!r:.200}"
    extra_info = row.get("extra_info") or {}
    try:
        tools_kwargs = read_tools_kwargs(extra_info.get("tools_kwargs") or row.get("tools_kwargs"), where)
    except ConfigError as error:
        return str(error)
    if extra_info.get("need_tools_kwargs") and not tools_kwargs:
        return f"{where}: need_tools_kwargs is set, but tools_kwargs names no tool"
    for name, methods in tools_kwargs.items():
        if name not in tools:
            return f"{where}: tools_kwargs names {name!r}, which is no tool of the YAML; known are {sorted(tools)}"
        try:
            for method in METHODS:
                bind_kwargs(tools[name], method, methods.get(f"{method}_kwargs", {}), where)
        except ConfigError as error:
            return str(error)
    return None
