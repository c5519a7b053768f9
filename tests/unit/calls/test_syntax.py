"""Python text that many threads read at once."""

import ast
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from verl_multiturn.syntax import parse_expression, parse_module

TEXT = "assert f(1, [2, {3: (4, -5)}]) == 3\n" * 200


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns while trees are built, which the collector's callbacks give them the occasion for."""

    def look(*_: Any) -> None:
        sum(range(50))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    gc.callbacks.append(look)
    yield
    gc.callbacks.remove(look)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.long)])
def test_no_thread_meets_what_others_read(switching: None, rounds: int) -> None:
    failed: list[BaseException] = []
    trees: list[ast.Module] = []

    def read(depth: int) -> None:
        if depth:
            return read(depth - 1)
        try:
            trees.extend(parse_module(TEXT) for _ in range(rounds))
        except BaseException as error:
            failed.append(error)
        return None

    threads = [threading.Thread(target=read, args=(3 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(trees) == 6 * rounds
    assert ast.unparse(trees[-1]) == TEXT.strip()


def test_another_thread_in_between_is_met_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [SystemError("AST constructor recursion depth mismatch (before=42, after=37)")] * 7
    parse = ast.parse

    def meddled(*args: Any, **kwargs: Any) -> ast.AST:
        if errors:
            raise errors.pop()
        return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", meddled)
    assert ast.unparse(parse_expression("f(a = 1)")) == "f(a=1)"
    errors.extend([SystemError("of another kind")] * 100)
    with pytest.raises(SystemError, match="of another kind"):
        parse_module("a = 1")


def test_what_is_no_python_is_said_as_ever() -> None:
    with pytest.raises(SyntaxError):
        parse_expression("a = 1")
    with pytest.raises(SyntaxError):
        parse_module("a = ")
    with pytest.raises(SyntaxError):
        parse_module("a\0")
    with pytest.raises((RecursionError, MemoryError)):
        parse_expression("-" * 100_000 + "1")
