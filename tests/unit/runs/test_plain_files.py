"""A file that somebody else may have put there is opened only if it is a plain one, and lies where it is looked for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import FileKindError, open_regular


def test_a_plain_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab")
    with open_regular(tmp_path / "a", within=tmp_path) as file:
        assert file.read() == b"ab"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "b")


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a folder", "a device", "a link that leads nowhere"])
def test_what_is_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a\nb"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a socket":
        monkeypatch.chdir(tmp_path)  # the address of a socket has some 100 characters
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(path.name)
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(FileKindError, match=rf"'{tmp_path}/a\\nb' is {kind}; expected a plain file") as raised:
        open_regular(path)
    assert isinstance(raised.value, OSError)
    assert isinstance(raised.value, ConfigError)


def test_links_within_a_folder_and_out_of_it(tmp_path: Path) -> None:
    folder, other = tmp_path / "records", tmp_path / "private"
    for each in (folder / "deep", other):
        each.mkdir(parents=True)
    (folder / "deep" / "a").write_bytes(b"a")
    (other / "a").write_bytes(b"secret")
    (folder / "inner").symlink_to("deep/a")
    (folder / "outer").symlink_to(other / "a")
    (folder / "turned").symlink_to(other)
    with open_regular(folder / "inner", within=folder) as file:
        assert file.read() == b"a"
    (tmp_path / "named").symlink_to(folder)  # how a user may name the folder itself
    with open_regular(tmp_path / "named" / "deep" / "a", within=tmp_path / "named") as file:
        assert file.read() == b"a"
    for path in (folder / "outer", folder / "turned" / "a", folder / ".." / "private" / "a"):
        with pytest.raises(FileKindError, match=f"leads out of '{folder}'"):
            open_regular(path, within=folder)
    with open_regular(folder / "outer") as file:
        assert file.read() == b"secret"
