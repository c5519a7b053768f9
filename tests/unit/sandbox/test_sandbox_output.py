"""The part of a cell's output that is kept."""

import pytest

from verl_multiturn.sandbox.output import BoundedOutput


def test_short_output_is_kept_as_it_is() -> None:
    output = BoundedOutput(100)
    output.add(b"one ")
    output.add("zwölf\n".encode())
    assert output.take() == "one zwölf\n"
    assert output.take() == ""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_long_output_keeps_its_ends(size: int) -> None:
    text = "".join(f"{i:06}" for i in range(1000)).encode()
    output = BoundedOutput(100)
    for start in range(0, len(text), size):
        output.add(text[start : start + size])
    kept = output.take()
    assert kept == f"{text[:50].decode()}\n[… the output of 6000 bytes is shortened …]\n{text[-50:].decode()}"


def test_it_is_cut_by_characters_not_bytes() -> None:
    output = BoundedOutput(100)
    output.add(("é" * 100).encode())
    assert output.take() == "é" * 100
    output.add(("é" * 101).encode())
    assert output.take() == "é" * 50 + "\n[… the output of 202 bytes is shortened …]\n" + "é" * 50


def test_bytes_that_are_no_text() -> None:
    output = BoundedOutput(100)
    output.add(b"a\xff\x80b\xed\xa0\x80")
    assert output.take() == "a\ufffd\ufffdb\ufffd\ufffd\ufffd"


def test_a_flood_is_not_kept() -> None:
    output = BoundedOutput(100)
    for _ in range(1000):
        output.add(b"x" * 65536)
    assert output.total == 65_536_000
    assert len(output._head) + len(output._tail) <= 400
    assert len(output.take()) < 200
