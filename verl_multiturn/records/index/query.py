"""The viewer's filter: a short text that selects the conversations of a table.

    step>=3 score<1 stop_reason=response_length,turn_length tools_s!=none gsm8k

Terms are parted by spaces, and all of them must hold. `NAME OP VALUE` compares a column: `=` and `!=` take several
values, parted by commas; `~` asks whether a text holds another, whatever the case. `none` is a column without a value.
A term without an operator is looked for in the texts of a row (`SEARCHED`). A value with spaces is between `"`;
a `"` in it is written twice. `static/query.js` reads the same for exported pages; a test compares both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

SEARCHED = ("request_id", "uid", "data_source", "index", "stop_reason", "fate", "why")
"""Columns in which a term without an operator is looked for."""
_TERM = re.compile(r'\s*(?:([a-z_]+)(!=|>=|<=|=|>|<|~))?("(?:[^"]|"")*"|[^\s"]+)')
_COMPARED = {">": pc.greater, ">=": pc.greater_equal, "<": pc.less, "<=": pc.less_equal}
_SHOWN = 3
_WORDS = {"true": True, "yes": True, "false": False, "no": False}


class Term(NamedTuple):
    """One term: the column ("": a search), the operator and the values."""

    name: str
    operator: str
    values: tuple[str, ...]


def parse(text: str) -> list[Term]:
    """Return the terms of a filter.

    Raises:
        ConfigError: It cannot be read.
    """
    terms, at = [], 0
    text = text.strip()
    while at < len(text):
        found = _TERM.match(text, at)
        if found is None:
            raise ConfigError(
                f"the filter cannot be read from {text[at:]!r} on; expected terms such as step>=3, score<1, "
                'stop_reason=length or a word; put a value with spaces between "'
            )
        at = found.end()
        name, operator, value = found[1] or "", found[2] or "", found[3]
        quoted = value.startswith('"')
        value = value[1:-1].replace('""', '"') if quoted else value
        several = operator in ("=", "!=") and not quoted
        terms.append(Term(name, operator, tuple(value.split(",")) if several else (value,)))
    return terms


def mask_of(table: pa.Table, terms: list[Term]) -> pa.ChunkedArray | None:
    """Return which rows of a table hold all terms; None: all do.

    Raises:
        ConfigError: A term names no column, or compares it with a value of another kind.
    """
    mask = None
    for term in terms:
        own = _search(table, term.values[0]) if not term.name else _compare(table, term)
        mask = own if mask is None else pc.and_(mask, own)
    return mask


def _search(table: pa.Table, text: str) -> pa.ChunkedArray:
    found = None
    for name in SEARCHED:
        if name in table.column_names:
            own = pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
            found = own if found is None else pc.or_(found, own)
    return found


def _compare(table: pa.Table, term: Term) -> pa.ChunkedArray:
    name, operator, values = term
    if name not in table.column_names:
        raise ConfigError(f"the filter names the column {name!r}; expected one of {', '.join(table.column_names)}")
    column = table[name]
    if operator == "~":
        if not pa.types.is_string(column.type):
            raise ConfigError(f"the filter {name}~{values[0]} is for texts, and {name} is a number; use =, <, >")
        return pc.fill_null(pc.match_substring(column, values[0], ignore_case=True), False)
    if operator in _COMPARED:
        if pa.types.is_string(column.type):
            raise ConfigError(
                f"the filter {name}{operator}{values[0]} is for numbers, and {name} is a text; use = or ~"
            )
        return pc.fill_null(_COMPARED[operator](column, _value(name, values[0], column.type)), False)
    found = None
    for value in values:
        own = (
            pc.is_null(column)
            if value == "none"
            else pc.fill_null(pc.equal(column, _value(name, value, column.type)), False)
        )
        found = own if found is None else pc.or_(found, own)
    return pc.invert(found) if operator == "!=" else found


def _value(name: str, text: str, kind: Any) -> pa.Scalar:
    if pa.types.is_string(kind):
        return pa.scalar(text)
    if pa.types.is_boolean(kind):
        if text.lower() not in _WORDS:
            raise ConfigError(f"the filter compares {name} with {text!r}; expected true or false")
        return pa.scalar(_WORDS[text.lower()])
    try:
        return pa.scalar(float(text))
    except ValueError:
        raise ConfigError(f"the filter compares {name} with {text!r}; expected a number") from None


def one_of(where: str, given: str, known: Iterable[str], what: str) -> str:
    """Return the one name that is this one, or begins with it; `show` and `replay` take such beginnings.

    Args:
        where: The option or argument that gives it.
        given: The name, or its beginning.
        known: The names that are there.
        what: Noun for such a name.

    Raises:
        ConfigError: There is none, or there are several.
    """
    names = set(known)
    if given in names:
        return given
    found = sorted(name for name in names if given and name.startswith(given))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{where} {show(given)}: {len(found)} ids begin so, such as {', '.join(map(show, found[:_SHOWN]))}; "
            "write more of it"
        )
    one = f"; one that is there is {show(min(names))}" if names else ""
    raise ConfigError(f"{where} {show(given)}: there is no such {what} among {len(names)}{one}")
