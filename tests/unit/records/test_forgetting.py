"""`sessions forget`: a user's sessions go from every file, those of others stay, and a kill loses nothing."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.gateway_samples import BEGAN, START, GatewaySamples
from verl_multiturn.cli import sessions
from verl_multiturn.cli.sessions import sessions_app
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import rewards_of
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.write import forgetting
from verl_multiturn.records.write.forgetting import forget_user
from verl_multiturn.records.write.locks import LOCK, HeldError, hold
from verl_multiturn.records.write.session_joins import join_sessions

USERS = ("ann", "bob")
MANY = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def name_of(number: int) -> str:
    return f"{USERS[number % 2]}-{number}"


def gateway(folder: Path) -> Path:
    """Write a folder with sessions of two users, in two rotations, and an index of it in the cache."""
    made = GatewaySamples(folder)
    for number in range(MANY):
        user = USERS[number % 2]
        made.begin(name_of(number), user, number=number)
        made.end(name_of(number), user, number=number, messages=[{"role": "user", "content": f"words of {user}"}])
        made.write("reward", name_of(number), reward=1.0, id=f"judge-{user}")
        if number == MANY // 2:
            made.close()
            made.rotate()
    made.begin("ann-running", "ann", number=MANY)
    made.writer.raised({"request_id": "ann-running", "uid": "t", "number": MANY, "why": "words of ann"})
    made.write("reward", name_of(0), reward=0.5, at=BEGAN + 50)  # in another file than its start
    made.close()
    shot = {"at": BEGAN, "open": [{"request_id": "ann-running", "began": BEGAN, "doing": "call", "since": BEGAN}]}
    (folder / f"{made.writer.stem}.open.json").write_text(json.dumps(shot))  # as a kill leaves it
    join_sessions(folder, START)
    index = Index(Records(folder))
    index.refresh()
    assert index.save() == ""
    return folder


def everything(folder: Path) -> bytes:
    """Return all that lies in a folder and in the cache, unpacked as far as it is packed by gzip."""
    parts = []
    for path in [*folder.rglob("*"), *Path(os.environ["XDG_CACHE_HOME"]).rglob("*")]:
        if path.is_file():
            parts += [path.name.encode(), gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else b""]
            parts += [path.read_bytes()]
    return b"\0".join(parts)


def seen(folder: Path) -> set[str]:
    """Return which users' names lie somewhere in a folder."""
    held = everything(folder)
    return {user for user in USERS if user.encode() in held}


def is_well(folder: Path) -> bool:
    records = Records(folder)
    assert {each["request_id"] for each in records.records()} == {name_of(n) for n in range(1, MANY, 2)}
    assert {name: each.score for name, each in rewards_of(records).items()} == dict.fromkeys(
        (name_of(n) for n in range(1, MANY, 2)), 1.0
    )
    index = Index(records)
    index.refresh()
    assert index.faults == {}
    assert all(each.verified is not None and not each.verified.violations for each in verify_files([folder]))
    return records.faults == []


def test_a_user_is_forgotten_and_the_others_stay(tmp_path: Path) -> None:
    folder = gateway(tmp_path / "records")
    assert seen(folder) == {"ann", "bob"}
    found = forget_user(folder, "ann")
    assert (len(found.sessions), found.records, found.rewards, found.running) == (4, 3, 4, 1)
    assert (found.join_rows, found.session_lines, found.lines) == (6, 7, 8)
    assert found.indices == 1
    assert seen(folder) == {"bob"}
    assert is_well(folder)


def test_members_of_others_stay_byte_by_byte(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    made = GatewaySamples(folder)
    for user in ("bob", "ann", "bob"):
        made.begin(user + str(len(list(folder.iterdir()))), user)
    made.close()
    writers = []
    for user in ("bob", "ann", "bob"):
        made = GatewaySamples(tmp_path / user)
        made.begin(f"{user}{len(writers)}", user)
        made.end(f"{user}{len(writers)}", user)
        made.close()
        writers.append(next((tmp_path / user).glob(f"{made.writer.stem}.jsonl.gz")).read_bytes())
    (folder / f"{START}-h-1-aa.jsonl.gz").write_bytes(b"".join(writers))
    forget_user(folder, "ann")
    assert (folder / f"{START}-h-1-aa.jsonl.gz").read_bytes() == writers[0] + writers[2]


def test_a_user_without_sessions_changes_nothing(tmp_path: Path) -> None:
    folder = gateway(tmp_path / "records")
    before = everything(folder)
    assert forget_user(folder, "carl").sessions == frozenset()
    assert everything(folder).replace(LOCK.encode(), b"").replace(b"\0", b"") == before.replace(b"\0", b"")


class Killed(BaseException):
    """Ends the command as a kill does: nothing after it runs but `finally`."""


def changes(monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> list[int]:
    """Count changes of files by a command, and let one of them kill it."""
    count = [0]

    def counted(real: Any) -> Any:
        def change(*given: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == kill_at:
                raise Killed
            return real(*given, **named)

        return change

    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    return count


def test_a_kill_at_any_change_is_finished_by_a_repeated_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gateway(tmp_path / "whole")
    with monkeypatch.context() as patch:
        count = changes(patch, None)
        forget_user(folder, "ann")
    assert count[0] > 6
    for number in range(1, count[0] + 1):
        folder = gateway(tmp_path / str(number))
        with monkeypatch.context() as patch:
            changes(patch, number)
            with pytest.raises(Killed):
                forget_user(folder, "ann")
        with pytest.raises(HeldError, match="repeat that command"):
            hold(folder / LOCK, alone=False)
        forget_user(folder, "nobody")  # any such command finishes it
        hold(folder / LOCK, alone=False).close()
        assert seen(folder) == {"bob"}, number
        assert is_well(folder), number


def test_a_kill_before_the_end_of_the_report_does_not_lose_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, words = gateway(tmp_path / "records"), ["--models", str(tmp_path / "runs")]
    (tmp_path / "runs" / "one" / "data").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "data" / "lineage.jsonl").write_text('{"row": 0, "request_id": "ann-0"}\n')
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_told", lambda *_: 1 // 0)  # nothing of the last line is printed
        found = CliRunner().invoke(sessions_app, ["forget", "--user", "ann", "--records", str(folder), *words])
        assert isinstance(found.exception, ZeroDivisionError)
    assert seen(folder) == {"ann", "bob"}, "the ids are the last trace"
    status, said, last = told("--user", "ann", "--records", str(folder), *words)
    assert status == 0
    assert (last["sessions"], [each["sessions"] for each in last["models"]]) == (4, [1])
    assert f"{tmp_path / 'runs' / 'one'} learned from 1 of these sessions" in said
    assert seen(folder) == {"bob"}


def test_a_kill_as_ids_are_noted_keeps_those_of_the_command_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gateway(tmp_path / "records")
    (folder / LOCK).write_bytes(b'\n["ann-of-before"]\n["torn')
    noted: list[bytes] = []

    def killed(value: Any) -> bytes:
        noted.append((folder / LOCK).read_bytes())
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(forgetting.orjson, "dumps", lambda value: killed(value) if isinstance(value, list) else b'"ann"')
        with pytest.raises(Killed):
            forget_user(folder, "ann")
    assert noted
    assert forget_user(folder, "ann").sessions == {"ann-of-before", "ann-running", "ann-0", "ann-2", "ann-4"}
    assert seen(folder) == {"bob"}


def test_a_torn_member_goes_with_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    made = GatewaySamples(folder)
    made.begin("ann-0", "ann")
    made.end("ann-0", "ann")
    made.begin("bob-1", "bob")
    made.end("bob-1", "bob")
    made.close()
    (path,) = folder.glob("*.gz")
    path.write_bytes(path.read_bytes() + path.read_bytes()[:300])
    (lines,) = folder.glob("*.lines.jsonl")
    lines.write_bytes(lines.read_bytes() + b'{"event": "begin", "request_id": "ann')
    found = forget_user(folder, "ann")
    assert found.unreadable == 2
    assert b"ann" not in everything(folder)
    assert [each["request_id"] for each in Records(folder).records()] == ["bob-1"]


def test_a_gateway_that_runs_is_refused(tmp_path: Path) -> None:
    folder = gateway(tmp_path / "records")
    before = everything(folder)
    with hold(folder / LOCK, alone=False), pytest.raises(HeldError, match="stop it"):
        forget_user(folder, "ann")
    (first, *_) = folder.glob("*.sessions.jsonl")
    with hold(first, alone=True), pytest.raises(HeldError, match="stop it"):
        forget_user(folder, "ann")
    assert everything(folder).replace(LOCK.encode(), b"").replace(b"\0", b"") == before.replace(b"\0", b"")


def told(*words: str) -> tuple[int, str, dict[str, Any]]:
    found = CliRunner().invoke(sessions_app, ["forget", *words])
    last = found.output.strip().splitlines()[-1]
    return found.exit_code, found.output, json.loads(last) if last.startswith("{") else {}


def test_the_command_names_models_and_files_of_others(tmp_path: Path) -> None:
    folder = gateway(tmp_path / "records")
    (tmp_path / "runs" / "one" / "data").mkdir(parents=True)
    lines = [{"row": 0, "request_id": "ann-0"}, {"row": 1, "request_id": "bob-1"}, {"row": 2, "request_id": "ann-0"}]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (tmp_path / "runs" / "one" / "data" / "lineage.jsonl").write_text(text)
    (folder / "notes.txt").write_text("look at ann-2")
    status, said, found = told("--user", "ann", "--records", str(folder), "--models", str(tmp_path / "runs"))
    assert status == 1
    assert "notes.txt names a session" in said
    assert (found["sessions"], found["elsewhere"]) == (4, ["notes.txt"])
    expected = {"folder": str(tmp_path / "runs" / "one"), "rows": 2, "sessions": 1, "weights": {}}
    assert found["models"] == [expected]
    (folder / "notes.txt").unlink()
    status, said, _ = told("--user", "ann", "--records", str(folder))
    assert (status, "was started with this user; nothing was removed" in said) == (0, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--user", "", "--records", "."), "--user is empty"),
        (("--user", "ann", "--records", "absent"), "'absent' is no folder"),
        (("--user", "ann", "--records", ".", "--models", "absent"), "'absent' is no folder"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    status, output, _ = told(*words)
    assert status == 2
    assert said in output
    assert list(tmp_path.iterdir()) == []


def test_a_line_without_an_end_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gateway(tmp_path / "records")
    monkeypatch.setattr(forgetting, "LONGEST_LINE", 100)
    with pytest.raises(MultiTurnError, match="has a line of more than 100 bytes"):
        forget_user(folder, "ann")
