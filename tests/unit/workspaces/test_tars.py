"""Tars as data: honest ones come back whole, made ones are named and never opened."""

import io
import struct
import sys
import tarfile
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.errors import ConfigError
from verl_multiturn.workspaces.tars import TarFiles, read_tar, write_tar

LONG = "/".join(["a" * 90] * 10)
NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="/"), min_size=1).filter(
    lambda name: name not in (".", "..")
)


def made(*members: tarfile.TarInfo | tuple[str, bytes], **options: int) -> bytes:
    """Return a tar of made entries; those given as a pair are plain files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", **options) as tar:  # type: ignore[call-overload]  # its form
        for member in members:
            if isinstance(member, tuple):
                name, content = member
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                tar.addfile(member)
    return packed.getvalue()


def entry(name: str, kind: bytes, **values: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for key, value in values.items():
        setattr(member, key, value)
    return member


def with_field(tar: bytes, start: int, value: bytes) -> bytes:
    """Return a tar whose first header has another value, and a checksum that fits."""
    header = bytearray(tar[:512])
    header[start : start + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + tar[512:]


@given(st.dictionaries(NAMES, st.binary(max_size=1500)), st.booleans())
def test_what_is_written_is_read(files: dict[str, bytes], is_executable: bool) -> None:
    executable = set(files) if is_executable else set()
    assert read_tar(write_tar(files, executable)) == TarFiles(files, executable)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_usual_forms_are_read(form: int) -> None:
    tar = made(
        entry("d", tarfile.DIRTYPE), ("./d//x", b"1"), (f"{LONG[:150]}/b", b"2" * 600), ("empty", b""), format=form
    )
    assert read_tar(tar) == TarFiles({"d/x": b"1", f"{LONG[:150]}/b": b"2" * 600, "empty": b""})


def test_long_paths_and_other_alphabets() -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert read_tar(made((LONG, b"1"), ("é/猫", b"2"), format=form)).files == {LONG: b"1", "é/猫": b"2"}
    assert list(read_tar(made(("x" * 1_001, b""))).left_out.values()) == ["an empty or a very long path"]
    assert list(read_tar(made(("x/" * 100 + "x", b""))).left_out.values()) == ["an empty or a very long path"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/passwd", "an absolute path"),
        ("../up", "a path that leads out of its folder"),
        ("a/../../up", "a path that leads out of its folder"),
        ("a\nb", "a control character in its name"),
        ("a\x1b[2Jb", "a control character in its name"),
        ("a\u2028b", "a control character in its name"),
        ("a\udcffb", "no UTF-8"),
        (".", "an empty or a very long path"),
    ],
)
def test_paths_that_are_left_out(name: str, reason: str) -> None:
    tar = made((name, b"bad"), ("good", b"good"), format=tarfile.GNU_FORMAT)
    found = read_tar(tar)
    shown = repr(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    assert found == TarFiles({"good": b"good"}, left_out={shown: reason})
    if reason != "no UTF-8":
        with pytest.raises(ConfigError, match=f"of a file: {reason}; name it"):
            write_tar({name: b""})


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (entry("l", tarfile.SYMTYPE, linkname="/etc"), "a symbolic link"),
        (entry("l", tarfile.LNKTYPE, linkname="good"), "a hard link"),
        (entry("l", tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (entry("l", tarfile.BLKTYPE), "a device"),
        (entry("l", tarfile.FIFOTYPE), "a pipe"),
        (entry("l", b"Z"), "of the unknown kind b'Z'"),
        (entry("l", b"0", pax_headers={"GNU.sparse.size": "9999999999", "GNU.sparse.map": "0,1"}), "a sparse file"),
        (entry("l", b"S"), "a sparse file"),
    ],
)
def test_what_is_no_file_is_left_out(member: tarfile.TarInfo, reason: str) -> None:
    assert read_tar(made(member, ("l/below", b"1"))) == TarFiles({"l/below": b"1"}, left_out={"'l'": reason})


def test_one_name_twice_counts_once() -> None:
    found = read_tar(made(("a", b"first"), ("./a", b"second"), ("a/b", b""), ("d/e", b"1"), ("d", b"2")))
    assert found.files == {"a": b"first", "d/e": b"1"}
    both = "a file and a folder have one name"
    assert found.left_out == {"'./a'": "it comes twice", "'a/b'": both, "'d'": both}


def test_limits() -> None:
    many = made(*[(f"f{number}", b"") for number in range(20)])
    assert len(read_tar(many, max_entries=20).files) == 20
    found = read_tar(many, max_entries=19)
    assert (len(found.files), found.problem) == (19, "it has more than 19 entries")
    deep = made(*[(f"{number}{'/d' * 9}", b"") for number in range(20)])
    found = read_tar(deep, max_entries=20)
    assert (len(found.files), found.problem) == (2, "it has more than 20 folders")
    found = read_tar(made(("a", b"12345"), ("b", b"67890")), max_bytes=9)
    assert found == TarFiles({"a": b"12345"}, problem="its files have more than 9 bytes")


def work_of(tar: bytes) -> int:
    """Return how many functions are called to read a tar, those of C among them."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        read_tar(tar)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "above",
    [
        "/".join(["aaaaaaaa"] * 90),  # it took seconds, in which the worker's other conversations waited
        "a.txt/" + "/".join(["aaaaaaaa"] * 89),  # below a file
    ],
)
def test_a_deep_folder_is_looked_at_once_however_many_files_lie_in_it(above: str) -> None:
    shallow, deep = (
        work_of(made(("a.txt", b""), *((f"{folder}/{number}{'x' * 100}.txt", b"") for number in range(500))))
        for folder in ("shallow", above)
    )
    assert deep < 1.1 * shallow + 1_000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tar: tar[:700], "it ends within an entry that begins at byte 0"),
        (lambda tar: tar[:300], "it is broken at byte 0"),
        (lambda tar: b"no tar" * 200, "it is broken at byte 0"),
        (lambda tar: tar[:1] + b"!" + tar[2:], "it is broken at byte 0"),
        (lambda tar: with_field(tar, 124, b"77777777777\0"), "its files have more than 33554432 bytes"),
        (lambda tar: with_field(tar, 124, b"\xff" * 12), "it is broken at byte 0"),
        (lambda tar: with_field(tar, 124, b"\x80" + b"\xff" * 11), "its files have more than 33554432 bytes"),
        (lambda tar: with_field(tar, 124, b"-1\0"), "it is broken at byte 0"),
        (lambda tar: with_field(tar, 156, b"x"), "it is broken before byte 2048"),
        (lambda tar: with_field(tar, 156, b"L"), "it is broken at byte 2048"),
    ],
)
def test_a_broken_tar_says_where(change: Callable[[bytes], bytes], problem: str) -> None:
    found = read_tar(change(made(("a", b"1" * 1200))))
    assert (found.files, found.problem) == ({}, problem)


def test_sizes_of_an_extended_header_are_no_way_out() -> None:
    for size, problem in (("-1", "broken before"), ("9" * 30, "broken before"), ("99999999999", "have more than")):
        member = entry("a", b"0", pax_headers={"size": size})
        assert problem in (read_tar(made(member)).problem or "")
    fields = b"30 path=" + struct.pack("B", 65) * 4
    tar = with_field(made(("x", fields)), 156, b"x")
    assert read_tar(tar) == TarFiles(problem="it is broken before byte 1024")


@given(st.binary(max_size=3000), st.integers(0, 2000))
def test_no_bytes_raise(noise: bytes, at: int) -> None:
    tar = made(("a", b"1" * 600), entry("b", b"0", pax_headers={"path": "é" * 60}), ("c", b"2"))
    for broken in (noise, tar[:at] + noise + tar[at + len(noise) :]):
        found = read_tar(broken)
        assert sum(map(len, found.files.values())) <= len(broken)
        assert all(path and not path.startswith("/") and ".." not in path.split("/") for path in found.files)
