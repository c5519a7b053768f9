"""Tars of files as data: `write_tar` makes one for `Workspace.put`, `read_tar` reads one that `Workspace.get` returned.

The second is the word of whatever ran in a workspace. Python's `tarfile` is made for archives that somebody unpacks,
and made headers have led it into endless loops. So the few forms that a plain archive needs are read here.

Invariants:
- nothing is unpacked: a tar becomes a mapping in memory, and no path in it is opened;
- every path of the mapping is relative, without `..`, in one form, and no path is a folder of another one;
- each refused entry is named, with its reason; of a tar that cannot be read to its end the place is named;
- time and memory are bounded by `max_entries`, `max_bytes` and the length of the tar, whatever sizes its headers claim.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from verl_multiturn.errors import ConfigError

_BLOCK = 512
_FILES, _NO_CONTENT = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_FOLDER, _PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK = b"5", b"x", b"g", b"L", b"K"
_LONGEST_PATH, _DEEPEST_PATH = 1_000, 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")
"""Unicode's categories Cc, Cs, Zl and Zp."""
_SHOWN_CHARACTERS = 200


@dataclass
class TarFiles:
    """Files of a tar, as data.

    Attributes:
        files: Content of each regular file, by path.
        executable: Paths of the files whose owner may execute them.
        left_out: Why an entry was not taken, by its name as `repr`. Folders are neither here nor in `files`.
        problem: None if the tar was read to its end; otherwise why not: it is broken, or a limit was reached. Then
            `files` has the ones before.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    executable: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def write_tar(files: Mapping[str, bytes], executable: Collection[str] = ()) -> bytes:
    """Return a tar of files; the same files give the same bytes.

    Args:
        files: Content of each file, by path.
        executable: Paths of the files that may be executed.

    Raises:
        ConfigError: A path is absolute, leads out of its folder, or holds a control character.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in sorted(files.items()):
            _, problem = _normal(path)
            if problem:
                raise ConfigError(f"the path {path!r} of a file: {problem}; name it as seen from its folder")
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755 if path in executable else 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def read_tar(tar: bytes, *, max_entries: int = 10_000, max_bytes: int = 32 * 2**20) -> TarFiles:
    """Read an untrusted tar; never raises for its content.

    Omitted and named: links, devices, pipes, sparse files; paths that are absolute, very long, or hold `..`, a control
    character or bytes that are not UTF-8; a path that came before, and one that is a folder of another.

    Args:
        tar: The tar, not compressed.
        max_entries: Largest number of entries of any kind, and of folders that files lie in, whether or not these are
            entries. An entry behind them is a `problem`.
        max_bytes: Largest size of all contents together. Content behind them is a `problem`.
    """
    return _TarReader(tar, max_entries, max_bytes).read()


class _BrokenError(Exception):
    pass


class _TarReader:
    def __init__(self, tar: bytes, max_entries: int, max_bytes: int) -> None:
        self._tar = tar
        self._max_entries = max_entries
        self._room = max_bytes
        self._max_bytes = max_bytes
        self._at = 0
        self._found = TarFiles()
        self._folders: set[str] = set()
        self._last: tuple[str, str, str] | None = None
        """The folder of the last file, as it was named, and the result of `_normal` for it."""
        self._below_files: set[str] = set()
        """Folders that cannot be there, since a file has the name of one above them, or their own."""

    def read(self) -> TarFiles:
        entries = 0
        try:
            while (header := self._header()) is not None:
                entries += 1
                if entries > self._max_entries:
                    raise _BrokenError(f"it has more than {self._max_entries} entries")
                self._entry(header)
        except _BrokenError as error:
            self._found.problem = str(error)
        return self._found

    def _header(self) -> bytes | None:
        """Return the next header; None at the end of the tar."""
        header = self._tar[self._at : self._at + _BLOCK]
        if not header.strip(b"\0"):
            return None
        if len(header) < _BLOCK or _octal(header[148:156]) != _checksum(header):
            raise _BrokenError(f"it is broken at byte {self._at}")
        self._at += _BLOCK
        return header

    def _entry(self, header: bytes) -> None:
        """Read an entry: the headers before it that make it longer, then its own, then its content."""
        name, size, is_sparse = None, None, False
        while (kind := header[156:157]) in (_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK):
            extra = self._content(_size(header, self._at))
            if kind == _LONG_NAME:
                name = extra.partition(b"\0")[0]
            elif kind == _PAX:
                fields = _pax_fields(extra, self._at)
                name = fields.get(b"path", name)
                size = _decimal(fields[b"size"], self._at) if b"size" in fields else size
                is_sparse = is_sparse or any(key.startswith(b"GNU.sparse.") for key in fields)
            following = self._header()
            if following is None:
                raise _BrokenError(f"it is broken at byte {self._at}")
            header = following
        name = _own_name(header) if name is None else name
        size = _size(header, self._at) if size is None else size
        if kind in _NO_CONTENT:
            size = 0
        is_folder = kind == _FOLDER or (kind in _FILES and name.endswith(b"/"))
        if is_folder:
            self._content(size)
            return
        if is_sparse or kind not in _FILES:
            self._leave_out(name, "a sparse file" if is_sparse else _KINDS.get(kind, f"of the unknown kind {kind!r}"))
            self._content(size)
            return
        if size > self._room:
            raise _BrokenError(f"its files have more than {self._max_bytes} bytes")
        content = self._content(size)
        self._room -= size
        self._take(name, content, bool(max(0, _octal(header[100:108])) & 0o100))

    def _take(self, name: bytes, content: bytes, is_executable: bool) -> None:
        try:
            path, problem = self._normal(name.decode())
        except UnicodeDecodeError:
            path, problem = "", "no UTF-8"
        if not problem and path in self._found.files:
            problem = "it comes twice"
        if not problem and (path in self._folders or not self._is_folder(path.rpartition("/")[0])):
            problem = "a file and a folder have one name"
        if problem:
            self._leave_out(name, problem)
            return
        self._found.files[path] = content
        if is_executable:
            self._found.executable.add(path)

    def _normal(self, name: str) -> tuple[str, str]:
        """Do as `_normal`, and look at a folder's name once for the files in it that follow each other."""
        folder, slash, last = name.rpartition("/")
        if not slash or last in ("", ".", "..") or len(name) > _LONGEST_PATH:
            return _normal(name)
        if self._last is None or self._last[0] != folder:
            self._last = folder, *_normal(folder)
        above, problem = self._last[1:]
        if problem or above.count("/") + 2 > _DEEPEST_PATH or _CONTROL.search(last):
            return _normal(name)  # such as `./a`, whose folder has no name
        return f"{above}/{last}", ""

    def _is_folder(self, path: str) -> bool:
        """Take a path and its parents for folders; return whether no file has one of these names.

        Each folder is looked at once, however many files lie in it.
        """
        new: list[str] = []
        while path and path not in self._folders and path not in self._below_files:
            new.append(path)
            path = path.rpartition("/")[0]
        is_below = path in self._below_files or not self._found.files.keys().isdisjoint(new)
        known = self._below_files if is_below else self._folders
        if new and len(self._folders) + len(self._below_files) + len(new) > self._max_entries:
            raise _BrokenError(f"it has more than {self._max_entries} folders")  # one name may have a hundred
        known.update(new)
        return not is_below

    def _leave_out(self, name: bytes, reason: str) -> None:
        shown = repr(name.decode("utf-8", "backslashreplace")[:_SHOWN_CHARACTERS])
        self._found.left_out[shown] = reason

    def _content(self, size: int) -> bytes:
        content = self._tar[self._at : self._at + size]
        if len(content) < size:
            raise _BrokenError(f"it ends within an entry that begins at byte {self._at - _BLOCK}")
        self._at += -(-size // _BLOCK) * _BLOCK
        return content


def _normal(name: str) -> tuple[str, str]:
    """Return a path in its one form, and why it is refused; the latter is empty if it is not."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/"):
        return "", "an absolute path"
    if ".." in parts:
        return "", "a path that leads out of its folder"
    if _CONTROL.search(name):
        return "", "a control character in its name"
    if not parts or len(name) > _LONGEST_PATH or len(parts) > _DEEPEST_PATH:
        return "", "an empty or a very long path"
    return "/".join(parts), ""


def _own_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _size(header: bytes, at: int) -> int:
    """Return the size that a header claims, in octal, or in binary where its first bit is set."""
    digits = header[124:136]
    size = int.from_bytes(digits[1:]) if digits[0] == 0x80 else _octal(digits)
    if size < 0:
        raise _BrokenError(f"it is broken at byte {at - _BLOCK}")
    return size


def _checksum(header: bytes) -> int:
    """Return the sum of a header's bytes, with spaces in the place of its own checksum.

    The lower half of `adler32` is the sum of the bytes and 1, modulo 65521, which 256 bytes do not reach. It takes a
    tenth of the time of `sum`.
    """
    spaced = header[:148] + b"        " + header[156:]
    return (zlib.adler32(spaced[:256]) & 0xFFFF) + (zlib.adler32(spaced[256:]) & 0xFFFF) - 2


def _octal(digits: bytes) -> int:
    """Return a number; -1 where the digits are none."""
    text = digits.strip(b" \0")
    if not text:
        return 0
    return int(text, 8) if len(text) <= 12 and text.isdigit() and b"8" not in text and b"9" not in text else -1


def _decimal(digits: bytes, at: int) -> int:
    if not 0 < len(digits) <= 20 or digits.strip(b"0123456789"):
        raise _BrokenError(f"it is broken before byte {at}")
    return int(digits)


def _pax_fields(extra: bytes, at: int) -> dict[bytes, bytes]:
    """Return the fields of an extended header, each written as `LENGTH KEY=VALUE` and a line break."""
    fields: dict[bytes, bytes] = {}
    start = 0
    while start < len(extra) and extra[start] != 0:
        digits, _, _ = extra[start : start + 21].partition(b" ")
        length = _decimal(digits, at)
        record = extra[start + len(digits) + 1 : start + length]
        key, equals, value = record.partition(b"=")
        if start + length > len(extra) or not equals or not value.endswith(b"\n"):
            raise _BrokenError(f"it is broken before byte {at}")
        fields[key] = value[:-1]
        start += length
    return fields
