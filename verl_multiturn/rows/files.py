"""Read the rows of a local file, and distinguish rows by their digest; a placeholder of a file is refused.

Text is UTF-8, with or without the mark that editors write before it (BOM).

Invariant: `row_digest` is the one name of a row's content. An evaluation writes it into its records, and code that
joins two files or evaluations compares it.
"""

from __future__ import annotations

import codecs
import datetime
import decimal
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError


def read_text(path: Path, where: str, expected: str) -> str:
    """Return the text of a plain file; a pipe or a device may have no end.

    Args:
        path: The file.
        where: Its origin, for errors, for example `--row 'a.json'`.
        expected: The remedy, for errors.

    Raises:
        ConfigError: There is no such file, or it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{where} is no file; {expected}")
    refuse_pointer(path)
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read ({error}); {expected}") from None


def read_rows(path: Path, suffixes: Sequence[str]) -> list[Any]:
    """Read the rows of a file.

    Args:
        path: The file. Its suffix gives its kind.
        suffixes: Kinds of files that are accepted, for example `[".parquet", ".jsonl"]`.

    Raises:
        ConfigError: There is no such file, it is of another kind, or it cannot be read.
    """
    expected = ", ".join(f"*{suffix}" for suffix in suffixes)
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is no file; give one of {expected}")
    if path.suffix not in suffixes:
        raise ConfigError(f"{str(path)!r}: expected one of {expected}")
    refuse_pointer(path)
    try:
        return READERS[path.suffix](path)
    except Exception as error:  # a reader may raise anything for a damaged file
        raise ConfigError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {str(error)[:300]}); write the file again"
        ) from error


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row's content, 16 hexadecimal digits.

    It is the same for a row in a parquet and in a JSONL file, read by pyarrow, pandas or `datasets`: the
    order of keys does not count, an entry that is null is one that is missing, an array is a list, and 2.0 is 2.
    Everything else counts, `extra_info.index` as well, by which a reward may look its task up.

    Args:
        row: The row as its file has it, before verl's data set makes something of it.

    Raises:
        ConfigError: It holds something that neither kind of file can hold.
    """
    text = json.dumps(_plain(row), ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value of a row as JSON has it, the same for each way in which files and readers write it."""
    if hasattr(value, "tolist"):  # of numpy: an array, or one number
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return str(value) if not math.isfinite(value) else int(value) if value.is_integer() else value
    if isinstance(value, bytes):  # an encoded image
        return {"bytes": hashlib.blake2b(value, digest_size=8).hexdigest()}
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    if value is None or isinstance(value, str | int):
        return value
    raise ConfigError(f"a row holds a {type(value).__name__}; hash the row as its parquet or JSONL file has it")


def _parquet(path: Path) -> list[Any]:
    import pyarrow.parquet

    # `read_table` imports pandas, and takes columns from a path's `a=b`.
    with pyarrow.parquet.ParquetFile(path) as file:
        _refuse_repeated(file.schema_arrow.names)
        return list(file.read().to_pylist())


_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_OF_POINTER = 1024
"""Bytes that a pointer of Git LFS has at most."""
_LONGEST = 1 << 26
"""Bytes of a line. A row with pictures has some millions; a file of another kind may be one line without an end."""
_MOST_TEXT = 1 << 30
"""Bytes of a file that is read whole."""
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Marks of other encodings; that of UTF-32 begins as one of UTF-16 does."""
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32",
    (True, True, True, False): "UTF-32",
    (False, True, False, True): "UTF-16",
    (True, False, True, False): "UTF-16",
}
"""Which of the first four bytes are 0, in a text of these encodings that begins with two characters of ASCII."""


def refuse_pointer(path: Path) -> None:
    """Refuse a file of Git LFS that was not fetched, or a folder that holds one: its place has a few lines.

    Args:
        path: A file, or a folder whose own files are read. A path that is missing or unreadable is reported by
            the code that opens it.

    Raises:
        ConfigError: It is, or it holds, such a file.
    """
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            is_here = file == path or not file.is_symlink()  # another folder's files are not opened
            if is_here and file.is_file() and file.stat().st_size <= _MOST_OF_POINTER:
                with file.open("rb") as opened:
                    is_pointer = opened.read(len(_POINTER)) == _POINTER
                if is_pointer:
                    raise ConfigError(
                        f"{str(file)!r} is a Git LFS pointer, a few lines in the place of the file; run `git lfs pull` "
                        "in its repository"
                    )
    except OSError:
        return


def refuse_encoding(path: Path) -> None:
    """Refuse a file of text that begins as one in another encoding than UTF-8 does.

    Raises:
        ConfigError: It does.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(4)
    if (name := _other_encoding(begin)) is not None:
        raise ConfigError(f"{str(path)!r} is text in {name}; save it in UTF-8")


def _other_encoding(begin: bytes) -> str | None:
    zeros = _ZEROS.get(tuple(byte == 0 for byte in begin))
    return next((name for mark, name in _OTHER_MARKS.items() if begin.startswith(mark)), zeros)


def _text(path: Path) -> str:
    """Return the text of a file, without a mark before it.

    Raises:
        ValueError: It is in another encoding than UTF-8, or it is too large to be read whole.
    """
    if (size := path.stat().st_size) > _MOST_TEXT:
        most = _MOST_TEXT >> 20
        raise ValueError(f"it has {size >> 20} MiB, of {most} that are read at once; write large data as JSONL")
    content = path.read_bytes()
    if (name := _other_encoding(content[:4])) is not None:
        raise ValueError(f"it is text in {name}; save it in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"its byte {error.start} is no text in UTF-8; save it in UTF-8") from None


def _json_lines(path: Path) -> list[Any]:
    with path.open("rb") as file:
        if (name := _other_encoding(file.read(4))) is not None:
            raise ValueError(f"it is text in {name}; save it in UTF-8")
        file.seek(0)
        # Of bytes `\n` alone ends a line: a text may hold other line-ending characters.
        lines = enumerate(iter(partial(file.readline, _LONGEST), b""), 1)
        return [_json_line(number, text) for number, line in lines if (text := _line_text(number, line)).strip()]


def _line_text(number: int, line: bytes) -> str:
    if len(line) == _LONGEST and not line.endswith(b"\n"):
        raise ValueError(f"line {number} has {_LONGEST >> 20} MiB or more; expected a row a line")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {number}: its byte {error.start} is no text in UTF-8; save it in UTF-8") from None


def _json_line(number: int, line: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:  # its own line number counts within this line, not in the file
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, unless it has a key twice: one of its values would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice; remove one")
    return made


def _json(path: Path) -> list[Any]:
    """Return the rows of a JSON file: one list of rows, or one row in each line."""
    text = _text(path)
    return list(json.loads(text, object_pairs_hook=_object)) if text.lstrip().startswith("[") else _json_lines(path)


def _refuse_repeated(names: Sequence[str]) -> None:
    """Refuse columns of which two have one name: a row could hold one of them only."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the column {twice[0]!r} is there twice; rename one")


def _csv(path: Path) -> list[Any]:
    import csv

    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    names = list(reader.fieldnames or [])
    _refuse_repeated(names)
    rows = []
    for row in reader:
        if None in row:  # where the reader puts surplus cells
            raise ValueError(f"line {reader.line_num} has more cells than there are columns; quote what has a comma")
        rows.append(row)
    return rows


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
}
"""Readers by the suffix of a file."""
