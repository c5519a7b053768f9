"""Lines of JSON of a file, each checked against its model: what does not fit is named and left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ValidationError

from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError
from verl_multiturn.records.json_text import plain

LONGEST_LINE = 1 << 28
"""Largest number of bytes in a line, so that a file without line ends does not fill the memory."""


class TextLine(NamedTuple):
    """A line of a file."""

    offset: int
    number: int
    text: bytes
    whole: bool
    """Whether it has its line end."""


def read_lines(path: Path, start: int = 0) -> Iterator[TextLine]:
    """Yield the lines of a file that are not empty, from an offset on.

    Raises:
        CertificateError: A line does not end.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
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
        CertificateError: The line is whole, but is not an object, has a key twice or is beyond what JSON is read as.
    """
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    try:
        value = json.loads(text, object_pairs_hook=_with_each_key_once)
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
    """Return the JSON object of a line, quickly; what orjson refuses, older records may hold.

    Raises:
        CertificateError: It is torn, or no object.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = parse_line(text)
        if value is None:
            raise CertificateError("it is torn, or no JSON") from None
        value = plain(value)
    if not isinstance(value, dict):
        raise CertificateError(f"expected a JSON object, got {show(value, 60)}")
    return value


def fitted(model: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """Return an object in the form of its model: entries that it lacks get their defaults, unknown ones are left out.

    All its values are of JSON's types, so that what has the model's form already comes back equal.

    Raises:
        CertificateError: It does not fit.
    """
    try:
        return model.model_validate(value, extra="ignore").model_dump(mode="json", by_alias=True)
    except (ValidationError, RecursionError) as error:
        raise CertificateError(flaw_of(error)) from None


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


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. With a key twice, what was verified would not be what another reader sees."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CertificateError(f"no record of a conversation: an object has the key {twice!r} twice")
    return found
