"""A user who is forgotten is in no file any more; the command `benchmarks.forget` does the same with more sessions."""

from pathlib import Path

import pytest

from tests.long.observe.forgetting import forgotten, is_right


def test_a_forgotten_user_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = forgotten(tmp_path, sessions=20)
    assert is_right(found), found
