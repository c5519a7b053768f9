"""Slow builds are kept in the user's cache, once for all processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.vocabularies import kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "verl-multiturn" / "test-vocabularies"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_file_is_made_once(cache: Path) -> None:
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return '{"a": 1}'

    threads = [threading.Thread(target=kept, args=("it", make, read)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept("it", make, read) == {"a": 1}
    assert made == [1]
    assert kept("other", make, read) == {"a": 1}
    assert made == [1, 1]


@pytest.mark.parametrize("torn", ["", '{"a": '])
def test_a_file_that_cannot_be_read_is_made_again(cache: Path, torn: str) -> None:
    assert kept("it", lambda: '{"a": 1}', read) == {"a": 1}
    (file,) = cache.glob("*.json")
    file.write_text(torn)
    assert kept("it", lambda: '{"a": 2}', read) == {"a": 2}
    assert read(file) == {"a": 2}


def test_what_is_no_good_is_said(cache: Path) -> None:
    with pytest.raises(json.JSONDecodeError):
        kept("it", lambda: "no", read)
    with pytest.raises(ZeroDivisionError):
        kept("it", lambda: str(1 / 0), read)
    assert kept("it", lambda: "1", read) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock"]
