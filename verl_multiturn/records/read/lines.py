"""Lines of JSON of a file, each checked against its model: a line that does not fit is named and skipped."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError
from verl_multiturn.paths import open_regular
from verl_multiturn.records.json_text import parse_strictly, plain
from verl_multiturn.records.schema import SCHEMA

LONGEST_LINE = 1 << 26
"""Largest number of bytes in a line, so that a file without line ends does not fill the memory.

A row of 32,768 tokens with their log-probabilities has some 620,000, the whole answer of a call 1,000,000 at most.
"""
MOST_MEMORY = 192_000_000
"""Bytes that the values of a line may take once they are read and copied. A row of 32,768 tokens takes 5,300,000."""
_COSTS = {b",": 80, b"[": 80, b"{": 80, b":": 250, b'"': 12}
"""Bytes of memory that a line's values take at most, by the characters between them, with the copy of `fitted`."""
_CHEAP = MOST_MEMORY // 64
"""A line of so many bytes cannot take more, whatever is in it."""
_reading = threading.RLock()
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class TextLine(NamedTuple):
    """A line of a file."""

    offset: int
    number: int
    text: bytes
    whole: bool
    """Whether it has its line end."""


def alone_if_large(size: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a text is read: of large ones a process reads one at a time, or threads add them up.

    Args:
        size: Bytes of the text.
    """
    return _reading if size > _CHEAP else contextlib.nullcontext()


def read_lines(path: Path, start: int = 0) -> Iterator[TextLine]:
    """Yield the lines of a file that are not empty, from an offset on.

    Raises:
        CertificateError: A line does not end.
        OSError: The file cannot be read.
    """
    with open_regular(path, within=path.parent) as file:
        offset, number = file.seek(start), 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise CertificateError(
                    f"{path}:{number}: a line of more than {LONGEST_LINE} bytes; expected one record a line, as JSON"
                )
            text = line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line  # a mark that editors write
            if text.strip():
                yield TextLine(offset, number, text.strip(), line.endswith(b"\n"))
            offset += len(line)


def parse_line(line: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for a line that was not written to its end.

    Raises:
        CertificateError: The line is whole, but is not an object, has a key twice or is beyond the limits of JSON here.
    """
    _refuse_costly(line)
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    try:
        value = parse_strictly(text)
    except json.JSONDecodeError:
        return None
    except RecursionError:
        raise CertificateError("it is nested too deeply for a record") from None
    except ValueError as error:  # an integer of thousands of digits
        raise CertificateError(f"no record of a conversation: {error}") from None
    if not isinstance(value, dict):
        named = {list: "a list", str: "a text", int: "a number", float: "a number"}
        found = named.get(type(value)) or json.dumps(value)
        raise CertificateError(f"expected a record, a JSON object, got {found}")
    return value


def read_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, quickly; older records may hold values that orjson refuses.

    Raises:
        CertificateError: It is torn, or no object, or would fill the memory.
    """
    _refuse_costly(text)
    with alone_if_large(len(text)):
        value, problem = _value_of(text)
    if problem:
        raise CertificateError(problem)
    if not isinstance(value, dict):
        raise CertificateError(f"expected a JSON object, got {show(value, 60)}")
    return value


def _value_of(text: bytes) -> tuple[Any, str]:
    """Return the value of a text, or the problem with it: an error would hold copies of the text while others read."""
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(text), ""
    try:
        value = parse_line(text)
    except CertificateError as error:
        return None, str(error)
    return (None, "it is torn, or no JSON") if value is None else (plain(value), "")


def _refuse_costly(line: bytes | str) -> None:
    """Refuse a line that is small as a text, and whose values are not: `[],` is 3 bytes, and an empty list 80."""
    if len(line) <= _CHEAP:
        return
    text = line.encode(errors="replace") if isinstance(line, str) else line
    if _cost(text) > MOST_MEMORY and _is_costly_outside_of_texts(text):
        raise CertificateError(f"its values would take more than {MOST_MEMORY // 1_000_000} MB of memory")


def _is_costly_outside_of_texts(text: bytes) -> bool:
    cost = at = 0
    for found in _STRING.finditer(text):
        cost += 2 * _COSTS[b'"'] + _cost(text[at : found.start()])
        at = found.end()
        if cost > MOST_MEMORY:
            return True
    return cost + _cost(text[at:]) > MOST_MEMORY


def _cost(text: bytes) -> int:
    return sum(text.count(letter) * cost for letter, cost in _COSTS.items())


def fitted(model: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """Return an object in the form of its model: entries that it lacks get their defaults, unknown ones are omitted.

    All its values are of JSON's types, so that an object in the model's form comes back equal.

    Raises:
        CertificateError: It does not fit.
    """
    try:
        return model.model_validate(value, extra="ignore").model_dump(mode="json", by_alias=True)
    except (ValidationError, RecursionError) as error:
        flaw = flaw_of(error)
    except PydanticSerializationError:  # its error for free contents
        flaw = flaw_of(RecursionError())
    raise CertificateError(flaw)  # outside of the handlers, so that it holds no error that holds the values


def require_schema(record: Mapping[str, Any]) -> None:
    """Refuse a record of another schema than ours; readers call it before they look at anything else of a record.

    Raises:
        CertificateError: Its entry `schema` is not ours, or is missing, as in records of before the first release.
    """
    if "schema" not in record:
        raise CertificateError(f"no record of a conversation: it has no entry 'schema', expected {SCHEMA}")
    if record["schema"] != SCHEMA:
        raise CertificateError(
            f"it is of schema {show(record['schema'], 40)}, this version reads {SCHEMA}; "
            "install the version that wrote it"
        )


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a model's entries, by name."""
    return {name: field.default for name, field in model.model_fields.items() if not field.is_required()}


def flaw_of(error: ValidationError | RecursionError) -> str:
    """Return the first thing that a model found wrong, as text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place or 'it'} is {show(first.get('input'), 60)}: {first['msg'].lower()}"
