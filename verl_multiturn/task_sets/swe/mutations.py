"""One-place mutations of Python source: where a text can be changed, and the changed text.

`tasks.py` makes a task of each mutation that the package's tests notice.

Invariants:
- a mutation replaces one span of bytes, and everything beside the span stays as it was, comments and layout too;
- the text of a sound mutation is Python, and its syntax tree differs from the original's;
- only code within functions is mutated: a module's own level mostly breaks the import, which every test notices;
- the same sources and the same seed give the same mutations in the same order.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from verl_multiturn.syntax import parse_module

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_KEPT_ORDER = {"delattr", "getattr", "hasattr", "isinstance", "issubclass", "setattr", "super"}
"""Functions whose arguments are never swapped by mistake."""


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    The span is that of the file's bytes, `[start, end)`.
    """

    path: str
    line: int
    kind: str
    """Such as `comparison`, `arithmetic`, `boolean`, `not`, `sign`, `constant`, `branches` or `arguments`."""
    function: str
    """Qualified name of the function around it."""
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the mutated text of the file.

        Raises:
            ValueError: The text does not have `before` in the span: it is another version's.
        """
        if source[self.start : self.end] != self.before.encode():
            raise ValueError(f"{self.path!r} has no {self.before!r} at byte {self.start}")
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """Return all mutations of a file, in the order of their places; `is_sound` has not checked them.

    Args:
        path: Path of the file, for the mutations.
        source: Its text in UTF-8.

    Raises:
        SyntaxError: It is not Python.
    """
    spans = _Spans(path, source)
    spans.visit(parse_module(source))
    return sorted(spans.found, key=lambda each: (each.start, each.end, each.kind, each.after))


def is_sound(mutation: Mutation, source: bytes) -> bool:
    """Return whether the mutated text of a file is Python that differs from the original in more than its layout."""
    try:
        changed = parse_module(mutation.apply(source))
    except (SyntaxError, ValueError):  # such as a `not` whose operand needs its brackets
        return False
    return ast.dump(changed) != ast.dump(parse_module(source))


def drawn_mutations(sources: Mapping[str, bytes], seed: int) -> Iterator[Mutation]:
    """Yield the sound mutations of some files in an order drawn by chance, one of each function before a second one.

    So tasks are spread over the package, and a long function does not have most of them.

    Args:
        sources: The files' texts by their paths.
        seed: Seed of the order.
    """
    rng = random.Random(seed)
    by_function: dict[tuple[str, str], list[Mutation]] = {}
    for path in sorted(sources):
        for mutation in mutations_of(path, sources[path]):
            by_function.setdefault((path, mutation.function), []).append(mutation)
    groups = list(by_function.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    for round_ in zip_longest(*groups):
        for mutation in round_:
            if mutation is not None and is_sound(mutation, sources[mutation.path]):
                yield mutation


class _Spans(ast.NodeVisitor):
    """Finds the places. Operators have no place in the syntax tree: they are between their operands."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self._within: list[str] = []
        self._functions = 0
        self.found: list[Mutation] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Look at the methods of a class."""
        self._within.append(node.name)
        for each in node.body:
            self.visit(each)
        self._within.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Look at a function's defaults and body, not at its annotations and decorators."""
        self._within.append(node.name)
        self._functions += 1
        for each in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(each)
        self._functions -= 1
        self._within.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave f-strings alone: the places of their contents are not those in the file."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they do no work."""

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change each operator of a comparison."""
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, "comparison", *_COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Change an arithmetic operator; the `%` behind a text formats it."""
        is_format = isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)
        if type(node.op) in _ARITHMETIC and not is_format:
            self._between(node.left, node.right, "arithmetic", *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Change the operator of `a += b`."""
        if type(node.op) in _ARITHMETIC:
            before, after = _ARITHMETIC[type(node.op)]
            self._between(node.target, node.value, "arithmetic", f"{before}=", f"{after}=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Change one `and` or `or`."""
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, "boolean", *_BOOLEAN[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a `not` or a minus."""
        start = self._start(node)
        if isinstance(node.op, ast.Not) and (word := re.compile(rb"not\b[ ]*").match(self._source, start)):
            self._add("not", node.lineno, start, word.end(), "")
        elif isinstance(node.op, ast.USub):
            self._add("sign", node.lineno, start, start + 1, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a whole number by one, and True or False to the other."""
        span = node.lineno, self._start(node), self._end(node)
        if isinstance(node.value, bool):
            self._add("constant", *span, str(not node.value))
        elif type(node.value) is int:
            self._add("constant", *span, str(node.value + 1))
            if node.value > 0:
                self._add("constant", *span, str(node.value - 1))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Swap the two values of `a if c else b`."""
        self._swap("branches", node.body, node.orelse)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap two positional arguments that follow one another."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _KEPT_ORDER:
            for first, second in zip(node.args, node.args[1:], strict=False):
                if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                    self._swap("arguments", first, second)
        self.generic_visit(node)

    def _swap(self, kind: str, first: ast.expr, second: ast.expr) -> None:
        start, end = self._start(first), self._end(second)
        one, other = self._source[start : self._end(first)], self._source[self._start(second) : end]
        between = self._source[self._end(first) : self._start(second)]
        self._add(kind, first.lineno, start, end, (other + between + one).decode())

    def _between(self, left: ast.expr, right: ast.expr, kind: str, before: str, after: str) -> None:
        """Change the operator between two operands. Only brackets, line breaks and comments are beside it there."""
        start, end = self._end(left), self._start(right)
        text = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._source[start:end])
        pattern = re.escape(before).replace(r"\ ", r"\s+")
        if found := re.search(pattern.encode(), text):
            line = left.end_lineno or left.lineno
            line += text[: found.start()].count(b"\n")
            self._add(kind, line, start + found.start(), start + found.end(), after)

    def _add(self, kind: str, line: int, start: int, end: int, after: str) -> None:
        if self._functions:
            before = self._source[start:end].decode()
            name = ".".join(self._within)
            self.found.append(Mutation(self._path, line, kind, name, start, end, before, after))

    def _start(self, node: ast.expr) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset
