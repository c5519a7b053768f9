"""Selection of a file's rows by a model's results: `0 < rate < 1` keeps those of which a group can learn.

Invariants:
- a condition is compared, never executed: it has comparisons of three names with numbers, `and` and `or`, and no more;
- a row is known by its content. Where the file's content is not the evaluated one any more, nothing is chosen.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.results import EvaluatedRow, Results
from verl_multiturn.paths import whole_file
from verl_multiturn.rows.files import read_rows, row_digest
from verl_multiturn.syntax import parse_expression

SUFFIXES = (".parquet", ".jsonl")
NAMES = ("rate", "n", "right")
_LONGEST = 1000
_EXPECTED = "expected comparisons of rate, n and right with numbers, joined by and / or, as in 0 < rate < 1"
_COMPARED: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Condition:
    """A condition on a row's `rate` (share of right ones), `n` (conversations with a reward) and `right` (right ones).

    Args:
        text: The condition. Example: `0 < rate < 1 and n >= 4`.

    Raises:
        ConfigError: It is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it has {len(text)} characters")
            self._tree = parse_expression(text.strip())
            _check(self._tree)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
            raise ConfigError(f"--where {text[:100]!r}: {what}; {_EXPECTED}") from None

    def holds(self, n: int, right: int) -> bool:
        """Return whether it holds for a row with `n` conversations, of which `right` are right; `n` is at least 1."""
        return _holds(self._tree, {"n": n, "right": right, "rate": right / n})


def _check(node: ast.expr) -> None:
    """Refuse a text that is not a condition.

    Raises:
        ValueError: It has something else.
    """
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value)
        return
    if not isinstance(node, ast.Compare):
        raise ValueError(f"{ast.unparse(node)[:50]!r} is no comparison")
    for test in node.ops:
        if type(test) not in _COMPARED:
            raise ValueError(f"{type(test).__name__} is none of < <= > >= == !=")
    for side in (node.left, *node.comparators):
        _value(side, dict.fromkeys(NAMES, 0.0))


def _holds(node: ast.expr, names: Mapping[str, float]) -> bool:
    if isinstance(node, ast.BoolOp):
        each = (_holds(value, names) for value in node.values)
        return all(each) if isinstance(node.op, ast.And) else any(each)
    assert isinstance(node, ast.Compare), "`_check` lets nothing else through"
    sides = [_value(side, names) for side in (node.left, *node.comparators)]
    return all(_COMPARED[type(test)](*pair) for test, pair in zip(node.ops, pairwise(sides), strict=True))


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    raise ValueError(f"{ast.unparse(node)[:50]!r} is neither a number nor one of {', '.join(NAMES)}")


class RowChoice(NamedTuple):
    """Which rows of a file are kept, and why others are not."""

    kept: list[int]
    """Numbers of the rows in the file."""
    left_out: dict[tuple[int, int], int]
    """Rows that the condition leaves out, counted by how many of how many conversations were right."""
    unjudged: int
    """Rows without a conversation that has a reward."""
    unknown: int
    """Rows of the file that were not evaluated."""

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return len(self.kept) + sum(self.left_out.values()) + self.unjudged + self.unknown


def choose(digests: Sequence[str], results: Results, condition: Condition, where: str) -> RowChoice:
    """Choose rows of a file.

    Args:
        digests: Digest of each row of the file (`row_files.row_digest`).
        results: The evaluation. Every conversation of it has ended.
        condition: The condition that a row must fulfil.
        where: A name of the file, for errors.

    Raises:
        ConfigError: The evaluation is not over, or has a row that the file has not.
    """
    if not results.is_over:
        raise ConfigError(
            f"the evaluation in {str(results.folder)!r} is not over, and what is left are the long ones; "
            "give the same eval command again"
        )
    evaluated: dict[str, deque[EvaluatedRow]] = defaultdict(deque)
    for row in results.rows:
        evaluated[row.digest].append(row)
    there = Counter(digests)
    missing = [own[-1] for digest, own in evaluated.items() if len(own) > there[digest]]
    if missing:
        raise ConfigError(
            f"{where} lacks {len(missing)} rows of the evaluation, such as row {missing[0].number} "
            f"({missing[0].digest}): they changed since, or it is another file; evaluate this file"
        )
    kept, left_out, unjudged, unknown = [], Counter[tuple[int, int]](), 0, 0
    for number, digest in enumerate(digests):
        if not (own := evaluated.get(digest)):
            unknown += 1
            continue
        row = own.popleft()
        right, n = row.right, len(row.scored)
        if not n:
            unjudged += 1
        elif condition.holds(n, right):
            kept.append(number)
        else:
            left_out[right, n] += 1
    return RowChoice(kept, dict(sorted(left_out.items())), unjudged, unknown)


def keep_rows(file: Path, results: Results, condition: Condition, target: Path) -> RowChoice:
    """Write the rows of a file that are kept into another file, as they are.

    Args:
        file: A parquet or JSONL file of rows.
        results: The evaluation of these rows.
        condition: The condition that a row must fulfil.
        target: The new file, of the same kind.

    Raises:
        ConfigError: A file cannot be read or written, the rows are not those that were evaluated, or none remains.
    """
    if target.suffix != file.suffix or target.exists():
        raise ConfigError(f"--to {str(target)!r}: expected a new file *{file.suffix}; name another one")
    digests = [row_digest(row) for row in read_rows(file, SUFFIXES)]
    choice = choose(digests, results, condition, repr(str(file)))
    if not choice.kept:
        raise ConfigError(f"--where {condition.text!r} leaves no row of {str(file)!r}; let more through")
    try:
        with whole_file(target) as half:
            _write(file, choice.kept, half)
    except OSError as error:
        raise ConfigError(f"--to {str(target)!r} cannot be written ({error}); name another place") from None
    return choice


def _write(file: Path, kept: Collection[int], target: Path) -> None:
    chosen = set(kept)
    if file.suffix == ".parquet":
        table = pq.read_table(file)
        pq.write_table(table.filter(pa.array([number in chosen for number in range(len(table))])), target)
        return
    # Blank is decided as in `read_rows`, which numbers the rows: a line of a no-break space, too.
    lines: Iterable[bytes] = (line for line in file.read_bytes().split(b"\n") if line.decode("utf-8-sig").strip())
    target.write_bytes(b"".join(line + b"\n" for number, line in enumerate(lines) if number in chosen))


def summary_of_choice(choice: RowChoice, results: Results, condition: Condition) -> dict[str, Any]:
    """Return a choice as JSON. `left_out` has numbers of rows by how many conversations were right, `RIGHT of N`."""
    return {
        "rows": choice.rows,
        "kept": len(choice.kept),
        "left_out": {f"{right} of {n}": count for (right, n), count in choice.left_out.items()},
        "without_reward": choice.unjudged,
        "not_evaluated": choice.unknown,
        "where": condition.text,
        "model": results.evaluation.model.hash,
        "samples": results.evaluation.samples,
    }
