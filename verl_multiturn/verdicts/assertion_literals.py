"""Find the values that the tests of a file expect: where the literals are, and which of them change together.

A test is changed as a whole, with one lot; of a parametrized one each row whose values are expected is.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.syntax import parse_module
from verl_multiturn.verdicts.decoys import EXACT, Decoys, Tolerance
from verl_multiturn.verdicts.parameters import Function, Mark, marks_of
from verl_multiturn.verdicts.subject import Subject

EQUALS = frozenset(
    (
        *(f"assert{kind}Equal" for kind in ("", "List", "Dict", "Tuple", "Set", "Sequence", "MultiLine")),
        *("assertEquals", "assertIs", "assert_equal", "assert_array_equal"),
    )
)
_NEAR = frozenset({"assertAlmostEqual", "assertAlmostEquals"})
_DEPTH = 4
_ROUNDING = 1e-9


@dataclass(eq=False)
class LiteralPlace:
    """A literal that an assertion expects.

    Attributes:
        node: It.
        value: Its value.
        arguments: The literals of the other side.
        tolerance: How far from it a number may be.
        is_certain: Whether a test that passes has compared with it.
    """

    node: ast.expr
    value: object
    arguments: tuple[object, ...]
    tolerance: Tolerance
    is_certain: bool


@dataclass(eq=False)
class ExpectedPart:
    """Hold the literals that one lot changes.

    Attributes:
        function: The test's name without its file and its parameters.
        mark: The number of the mark whose row it is; None: the whole function.
        row: The number of the row.
        places: The literals.
    """

    function: str
    mark: int | None
    row: int
    places: list[LiteralPlace] = field(default_factory=list)


@dataclass(eq=False)
class ExpectedValues:
    """Hold the values that the tests of a file expect.

    Attributes:
        tree: The file.
        marks: The marks of each function that is parametrized, and of which each row is changed by itself.
        parts: The parts to change.
    """

    tree: ast.Module
    marks: Mapping[str, Sequence[Mark]]
    parts: Sequence[ExpectedPart]


def expected_in(source: str) -> ExpectedValues | None:
    """Find the values that the tests of a file expect.

    Args:
        source: The file; None is returned of one that is not Python.
    """
    try:
        tree = parse_module(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    constants = _assigned(tree.body)
    loads = Counter(each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    marks: dict[str, Sequence[Mark]] = {}
    parts: list[ExpectedPart] = []
    for name, (function, above) in _tests(tree.body, "", ()).items():
        own = marks_of(function, above, {key: value for key, value in constants.items() if loads[key] == 1})
        reader = _ExpectationReader(function, own or [], constants, loads)
        found = reader.rows(name)
        if found:
            marks[name] = own or []
        parts += found or [part for part in [reader.whole(name)] if part.places]
    return ExpectedValues(tree, marks, parts)


def decoys_of(expected: ExpectedValues, words: frozenset[str]) -> list[list[Decoys]]:
    """Return the decoys of each place of each part, as far as there are any.

    Values of a part that are equal have the same decoys, and change together: one that differed would be the decoy.

    Args:
        expected: The values that its tests expect.
        words: Words and numbers of the row's tree.
    """
    literals, tokens = _said(expected.tree)
    found = []
    for part in expected.parts:
        alike: dict[tuple[str, Tolerance], list[LiteralPlace]] = {}
        for place in part.places:
            alike.setdefault((repr(place.value), place.tolerance), []).append(place)
        shared = {}
        for key, places in alike.items():
            own_literals, own_tokens = Counter[str](), Counter[str]()
            for node in {id(place.node): place.node for place in places}.values():
                some_literals, some_tokens = _said(node)
                own_literals += some_literals
                own_tokens += some_tokens
            rest = {each for each, count in literals.items() if count > own_literals[each]}
            rest |= {each for each, count in tokens.items() if count > own_tokens[each]}
            subject = Subject(tuple(each for place in places for each in place.arguments), frozenset(rest), words)
            shared[key] = Decoys(places[0].value, subject, places[0].tolerance)
            if _is_row(part.places):
                shared[key].exist = False
        found.append([shared[repr(place.value), place.tolerance] for place in part.places])
    return found


def _is_row(places: Sequence[LiteralPlace]) -> bool:
    """Return whether three or more numbers are a row of equal steps or factors, so that one that changes shows."""
    points = []
    for index, place in enumerate(places):
        if isinstance(place.value, int | float) and not isinstance(place.value, bool):
            numbers = [each for each in place.arguments if isinstance(each, int | float)]
            try:
                points.append((float(numbers[0] if len(numbers) == 1 else index), float(place.value)))
            except OverflowError:  # a whole number beyond a float is in no row that could be computed
                return False
    if len(points) < 3 or len({y for _, y in points}) < 3:
        return False
    (x0, y0), (x1, y1) = points[:2]
    is_line = all(math.isclose((y - y0) * (x1 - x0), (y1 - y0) * (x - x0), rel_tol=_ROUNDING) for x, y in points)
    factors = itertools.pairwise(y for _, y in points)
    return is_line or all(math.isclose(b * y0, a * y1, rel_tol=_ROUNDING) for a, b in factors)


def _said(tree: ast.AST) -> tuple[Counter[str], Counter[str]]:
    literals: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp):
            is_known, value = _literal(node)
            if is_known:
                literals[repr(value)] += 1
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = str(node.value)
        elif isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef | ast.ClassDef):
            text = next(getattr(node, key) for key in ("id", "attr", "name") if hasattr(node, key))
        tokens.update(each.lower() for each in re.findall(r"[A-Za-z]+|\d+", text))
    return literals, tokens


def _tests(
    body: Sequence[ast.stmt], above: str, classes: tuple[ast.ClassDef, ...]
) -> dict[str, tuple[Function, tuple[ast.ClassDef, ...]]]:
    found: dict[str, tuple[Function, tuple[ast.ClassDef, ...]]] = {}
    for node in body:
        if isinstance(node, Function) and node.name.startswith("test"):
            found[above + node.name] = node, classes
        elif isinstance(node, ast.ClassDef):
            found |= _tests(node.body, f"{above}{node.name}::", (*classes, node))
    return found


def test_names(tree: ast.Module) -> list[str]:
    """Return the names of a file's tests, without parameters.

    Args:
        tree: The file.
    """
    return list(_tests(tree.body, "", ()))


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the values assigned to each name, once."""
    found: dict[str, ast.expr] = {}
    counts: Counter[str] = Counter()
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts[node.id] += 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return {name: value for name, value in found.items() if counts[name] == 1}


class _ExpectationReader:
    """Finds the values that one test expects."""

    def __init__(
        self, function: Function, marks: Sequence[Mark], constants: Mapping[str, ast.expr], loads: Mapping[str, int]
    ) -> None:
        self._function = function
        self._marks = marks
        self._constants = constants
        self._locals = _assigned(function.body)
        self._names: Counter[str] = Counter(
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        )
        self._file_names = loads
        self._pairs = [
            (side, others, tolerance, certain)
            for assertion, certain in _assertions(function.body, True)
            for side, others, tolerance in self._sides(assertion)
        ]
        self._used = Counter(name for side, *_ in self._pairs for name in _names(side))

    def rows(self, name: str) -> list[ExpectedPart]:
        """Return the parts of a test whose parameters are expected."""
        found: dict[tuple[int, int], ExpectedPart] = {}
        for index, mark in enumerate(self._marks):
            for key in filter(self._is_expected, mark.names):
                pairs = [pair for pair in self._pairs if key in _names(pair[0])]
                near = [_near(side, tolerance) for side, _, tolerance, _ in pairs]
                if None in near:
                    continue
                tolerance = max((each for each in near if each), key=lambda each: (each.relative, each.absolute))
                others = [other for _, some, _, _ in pairs for other in some]
                certain = any(certain for *_, certain in pairs)
                for number, row in enumerate(mark.rows):
                    part = found.setdefault((index, number), ExpectedPart(name, index, number))
                    part.places += self._places(row[key], others, tolerance, certain, row)
        marks = {index for index, _ in found}
        return [part for part in found.values() if part.places] if len(marks) == 1 else []

    def whole(self, name: str) -> ExpectedPart:
        """Return the part of a test as a whole."""
        part = ExpectedPart(name, None, 0)
        seen = set()
        for side, others, tolerance, certain in self._pairs:
            near = _near(side, tolerance)
            for node in self._expected_nodes(side):
                if id(node) not in seen and near is not None:
                    seen.add(id(node))
                    part.places += self._places(node, others, tolerance if node is side else near, certain, {})
        return part

    def _is_expected(self, name: str) -> bool:
        return 0 < self._names[name] == self._used[name]

    def _expected_nodes(self, side: ast.expr) -> Iterator[ast.expr]:
        """Yield a side, and the values assigned to its names."""
        yield side
        for name in _names(side):
            if name in self._locals and self._is_expected(name):
                yield self._locals[name]
            elif name in self._constants and self._file_names[name] == self._used[name]:
                yield self._constants[name]

    def _places(
        self, node: ast.expr, others: Sequence[ast.expr], near: Tolerance, certain: bool, row: Mapping[str, ast.expr]
    ) -> list[LiteralPlace]:
        found = []
        arguments = tuple(value for other in others for value in self._literals(other, row, _DEPTH))
        for literal, tolerance in _parts(node, near):
            value = ast.literal_eval(literal)
            if value is not Ellipsis:
                found.append(LiteralPlace(literal, value, arguments, tolerance, certain))
        return found

    def _literals(self, node: ast.AST, row: Mapping[str, ast.expr], depth: int) -> Iterator[object]:
        """Yield the literals of an expression, and those that its names refer to."""
        is_known, value = _literal(node)
        if is_known:
            yield value
            return
        if isinstance(node, ast.Name) and depth:
            for meaning in (row, self._locals, self._constants):
                if node.id in meaning:
                    yield from self._literals(meaning[node.id], row, depth - 1)
                    return
        for child in ast.iter_child_nodes(node):
            yield from self._literals(child, row, depth)

    def _sides(self, node: ast.expr) -> Iterator[tuple[ast.expr, list[ast.expr], Tolerance]]:
        """Yield the values that an assertion expects, with the other sides, and how near is enough."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for each in node.values:
                yield from self._sides(each)
        sides: list[ast.expr] = []
        tolerance: Tolerance | None = EXACT
        if isinstance(node, ast.Compare) and all(isinstance(each, ast.Eq | ast.Is) for each in node.ops):
            sides = [*reversed(node.comparators), node.left]
        elif isinstance(node, ast.Call) and (name := _called(node)):
            if name in EQUALS | _NEAR and len(node.args) >= 2:
                sides = [node.args[1], node.args[0]]
                tolerance = _of_places(node) if name in _NEAR else EXACT
            elif name == "assertTrue" and node.args:
                yield from self._sides(node.args[0])
        if tolerance is None:
            return
        for index, side in enumerate(sides):
            others = sides[:index] + sides[index + 1 :]
            if self._may_be_expected(side) and not all(self._may_be_expected(each) for each in others):
                yield side, others, tolerance
                return

    def _may_be_expected(self, side: ast.expr) -> bool:
        """Return whether a side calls nothing but `approx`, and is made of literals, at least in a part."""
        if any(isinstance(each, ast.Call) and not _is_approx(each) for each in ast.walk(side)):
            return False
        rows = [row for mark in self._marks for row in mark.rows[:1]]
        for name in _names(side):
            if any(name in meaning and _is_plain(meaning[name]) for meaning in (self._locals, self._constants, *rows)):
                return isinstance(side, ast.Name | ast.Tuple | ast.List | ast.Call)
        return _is_plain(side)


def _names(side: ast.expr) -> list[str]:
    """Return the names whose values a side is made of."""
    match side:
        case ast.Name():
            return [side.id]
        case ast.List() | ast.Tuple():
            return [name for each in side.elts for name in _names(each)]
        case ast.Call() if _is_approx(side) and side.args:
            return _names(side.args[0])
    return []


def _near(side: ast.expr, tolerance: Tolerance) -> Tolerance | None:
    """Return how near is enough for the names of a side; None: unknown."""
    for each in ast.walk(side):
        if isinstance(each, ast.Call):
            return _of_approx(each)
    return tolerance


def _is_plain(node: ast.expr) -> bool:
    return next(_parts(node, EXACT), None) is not None


def _assertions(body: Sequence[ast.stmt], certain: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield each assertion, and whether a test that passes has come there."""
    for node in body:
        if isinstance(node, ast.Assert):
            yield node.test, certain
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.value, certain
        elif isinstance(node, ast.With | ast.AsyncWith):
            plain = not any("raises" in ast.unparse(each).lower() for each in node.items)
            yield from _assertions(node.body, certain and plain)
        elif isinstance(node, ast.Return):
            certain = False
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _assertions(getattr(node, part, None) or [], False)
            for handler in getattr(node, "handlers", None) or []:
                yield from _assertions(handler.body, False)
            certain = certain and not any(isinstance(each, ast.Return) for each in ast.walk(node))


def _parts(node: ast.expr, tolerance: Tolerance) -> Iterator[tuple[ast.expr, Tolerance]]:
    """Yield the largest literals without which an expression has another value. An index or a condition is none."""
    if _literal(node)[0]:
        yield node, tolerance
        return
    parts: Sequence[ast.expr | None] = ()
    match node:
        case ast.List() | ast.Tuple() | ast.Set():
            parts = node.elts
        case ast.Dict():
            parts = [*node.keys, *node.values]
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            parts = [node.left, node.right]
        case ast.JoinedStr():
            parts = [each for each in node.values if isinstance(each, ast.Constant)]
        case ast.Call() if _is_approx(node) and node.args and (near := _of_approx(node)):
            tolerance = near
            parts = node.args[:1]
    for part in parts:
        if part is not None:
            yield from _parts(part, tolerance)


def _of_approx(call: ast.Call) -> Tolerance | None:
    options = dict(zip(("rel", "abs"), call.args[1:], strict=False))
    options |= {each.arg: each.value for each in call.keywords if each.arg in ("rel", "abs")}
    found = {name: _literal(value)[1] for name, value in options.items()}
    if not all(each is None or isinstance(each, int | float) for each in found.values()):
        return None
    if any(not _literal(value)[0] for value in options.values()):
        return None
    relative, absolute = found.get("rel"), found.get("abs")
    if relative is None:
        relative = 1e-6 if absolute is None else 0.0
    return _tolerance(relative, 1e-12 if absolute is None else absolute)


def _tolerance(relative: Any, absolute: Any) -> Tolerance | None:
    """Return the tolerance of two numbers; None where one is beyond a float, so that nothing can be compared by it."""
    try:
        numbers = float(relative), float(absolute)
    except OverflowError:
        return None
    return Tolerance(*numbers) if all(map(math.isfinite, numbers)) else None


def _of_places(call: ast.Call) -> Tolerance | None:
    options = dict(zip(("places", "msg", "delta"), call.args[2:], strict=False))
    options |= {each.arg: each.value for each in call.keywords if each.arg}
    found = {name: _literal(value)[1] for name, value in options.items() if name != "msg"}
    delta, places = found.get("delta"), found.get("places", 7)
    if isinstance(delta, int | float):
        return _tolerance(0.0, delta)
    return _tolerance(0.0, f"1e{-places}") if isinstance(places, int) and "delta" not in found else None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_approx(call: ast.Call) -> bool:
    return _called(call) == "approx"


def _literal(node: ast.AST) -> tuple[bool, object]:
    if not isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp):
        return False, None
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None
