"""`pytest.mark.parametrize` in a test file: its rows, and the names that pytest gives to their tests."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Mark:
    """One `parametrize` whose rows are in the file.

    Attributes:
        call: The decorator.
        names: Names of the parameters.
        nodes: The rows.
        rows: The values of each row, by name.
        ids: The id that pytest gives to each row.
    """

    call: ast.Call
    names: tuple[str, ...]
    nodes: tuple[ast.expr, ...]
    rows: tuple[Mapping[str, ast.expr], ...]
    ids: tuple[str, ...]

    def hide_ids(self) -> None:
        """Give the rows numbers as ids, since an id holds the row's values."""
        self.call.keywords[:] = [each for each in self.call.keywords if each.arg != "ids"]
        numbers = ast.List([ast.Constant(str(index)) for index in range(len(self.rows))], ast.Load())
        self.call.keywords.append(ast.keyword("ids", numbers))
        for row in self.nodes:
            if isinstance(row, ast.Call):
                row.keywords[:] = [each for each in row.keywords if each.arg != "id"]


def marks_of(function: Function, above: Sequence[ast.ClassDef], constants: Mapping[str, ast.expr]) -> list[Mark] | None:
    """Return the marks of a test, in the order of their ids; None: one of them cannot be read.

    Args:
        function: The test.
        above: The classes that it is in, the innermost one last.
        constants: Literals of the module, by name.
    """
    found = []
    for owner in (function, *reversed(above)):
        for decorator in reversed(owner.decorator_list):
            if isinstance(decorator, ast.Call) and _last_name(decorator.func) == "parametrize":
                mark = _mark(decorator, constants)
                if mark is None or (isinstance(owner, ast.ClassDef) and len(owner.body) > 1 and _tests_in(owner) > 1):
                    return None
                found.append(mark)
    return found


def test_ids(marks: Sequence[Mark], hidden: bool) -> list[tuple[tuple[int, ...], str]]:
    """Return each test's rows, by number, and its id.

    Args:
        marks: The marks of a function.
        hidden: Whether the ids are those of `Mark.hide_ids`.
    """
    places = itertools.product(*(range(len(mark.rows)) for mark in marks))
    return [
        (rows, "-".join(str(row) if hidden else mark.ids[row] for mark, row in zip(marks, rows, strict=True)))
        for rows in places
    ]


def _tests_in(owner: ast.ClassDef) -> int:
    return sum(isinstance(each, Function) and each.name.startswith("test") for each in ast.walk(owner))


def _mark(call: ast.Call, constants: Mapping[str, ast.expr]) -> Mark | None:
    options = {each.arg: each.value for each in call.keywords}
    if len(call.args) != 2 or not options.keys() <= {"ids"}:
        return None  # `indirect` hands the values to a fixture
    try:
        names = ast.literal_eval(call.args[0])
    except (ValueError, TypeError, SyntaxError):
        return None
    is_text = isinstance(names, str)
    names = tuple(name.strip() for name in (names.split(",") if is_text else names) if str(name).strip())
    nodes = _row_nodes(call, constants)
    if not nodes or not all(isinstance(name, str) for name in names):
        return None
    rows, given = [], []
    for node in nodes:
        values, own = _values(node, is_text and len(names) == 1)
        if values is None or len(values) != len(names):
            return None
        rows.append(dict(zip(names, values, strict=True)))
        given.append(own)
    ids = _ids(rows, given, options.get("ids"), constants)
    return Mark(call, names, tuple(nodes), tuple(rows), ids) if ids else None


def _row_nodes(call: ast.Call, constants: Mapping[str, ast.expr]) -> list[ast.expr]:
    rows = call.args[1]
    if isinstance(rows, ast.Name):
        rows = constants.get(rows.id, rows)
    return rows.elts if isinstance(rows, ast.List | ast.Tuple) else []


def _values(node: ast.expr, is_single: bool) -> tuple[Sequence[ast.expr] | None, str | None]:
    if isinstance(node, ast.Starred):
        return None, None
    if isinstance(node, ast.Call) and _last_name(node.func) == "param":
        own = next((each.value for each in node.keywords if each.arg == "id"), None)
        return node.args, own.value if isinstance(own, ast.Constant) and isinstance(own.value, str) else None
    if is_single:
        return [node], None
    return (node.elts, None) if isinstance(node, ast.List | ast.Tuple) else (None, None)


def _ids(
    rows: Sequence[Mapping[str, ast.expr]],
    given: Sequence[str | None],
    option: ast.expr | None,
    constants: Mapping[str, ast.expr],
) -> tuple[str, ...]:
    """Return the ids as `_pytest.python.IdMaker` makes them; none where a function makes them."""
    listed: Sequence[object] = ()
    if option is not None:
        try:
            listed = ast.literal_eval(option) or ()
        except (ValueError, TypeError, SyntaxError):
            return ()
    ids = []
    for index, (row, own) in enumerate(zip(rows, given, strict=True)):
        chosen = own if own is not None else listed[index] if index < len(listed) else None
        if chosen is not None:
            ids.append(_shown(chosen) or str(chosen))
        else:
            ids.append("-".join(_id(value, f"{name}{index}", constants) for name, value in row.items()))
    counts, seen = Counter(ids), Counter[str]()
    for index, each in enumerate(ids):
        if counts[each] > 1:
            mark = "_" if each[-1:].isdigit() else ""
            while (unique := f"{each}{mark}{seen[each]}") in ids:
                seen[each] += 1
            ids[index] = unique
            seen[each] += 1
    return tuple(ids)


def _id(node: ast.expr, otherwise: str, constants: Mapping[str, ast.expr]) -> str:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    if isinstance(node, ast.Name | ast.Attribute) and _is_named(node):
        return node.id if isinstance(node, ast.Name) else node.attr
    try:
        shown = _shown(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError):
        return "<lambda>" if isinstance(node, ast.Lambda) else otherwise
    return otherwise if shown is None else shown


def _is_named(node: ast.Name | ast.Attribute) -> bool:
    """Return whether it is most probably a class or a function, whose name is its id."""
    return isinstance(node, ast.Name) or node.attr[:1].isupper()


def _shown(value: object) -> str | None:
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    if isinstance(value, bytes):
        return repr(value)[2:-1]
    return str(value) if value is None or isinstance(value, int | float | complex) else None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
