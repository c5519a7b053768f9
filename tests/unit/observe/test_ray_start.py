"""Places that Ray needs to start, and the cause of a start that failed, from folders as Ray 2.60 leaves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.runs import ray_start
from verl_multiturn.runs.ray_start import cause_in, is_late, load_text, problems, require_places

FATAL = (
    "[2026-11-28 21:21:17,699 C 11981 11981] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. "
    "You have likely discovered a bug in Ray. Please report this issue at https://github.com/ray-project/ray/issues "
    "and we'll work with you to fix it. Check failed: statussetor3576.has_value() Timed out waiting for file "
    "/tmp/ray/metrics_agent_port_c54f\n*** StackTrace Information ***\n/lib/raylet(+0xff770a) ray::operator<<()\n\n"
)
INFO = "[2026-11-28 21:21:00,300 I 11839 11839] (raylet) main.cc:13: Setting cluster ID to: 1\n"
ERROR = "[2026-11-28 21:21:00,300 E 11839 11839] (gcs_server) gcs_server.cc:1: port 6379 is taken\n"


def session(folder: Path, name: str, **logs: str) -> Path:
    path = folder / f"session_2026-11-28_{name}" / "logs"
    path.mkdir(parents=True)
    for log, text in logs.items():
        (path / log.replace("__", ".")).write_text(text)
    return path


def test_the_cause_is_the_raylets_last_fatal_line(tmp_path: Path) -> None:
    logs = session(tmp_path, "21-21-00_1_77", raylet__err=FATAL, raylet__out=INFO + FATAL, gcs_server__out=ERROR)
    said = f"Timed out waiting for file /tmp/ray/metrics_agent_port_c54f ({logs}/raylet.err)"
    assert cause_in(tmp_path, 0.0, 77) == said
    session(tmp_path, "21-22-00_1_88", raylet__err=ERROR)  # another user's
    assert cause_in(tmp_path, 0.0, 77) == said
    assert cause_in(tmp_path, 0.0, 78) == cause_in(tmp_path, 0.0, None)  # none of this process: the newest


def test_another_log_says_it_where_the_first_is_silent(tmp_path: Path) -> None:
    logs = session(tmp_path, "21-21-00_1_77", raylet__err="", raylet__out=INFO, gcs_server__out=ERROR)
    assert cause_in(tmp_path, 0.0, 77) == f"port 6379 is taken ({logs}/gcs_server.out)"


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert cause_in(tmp_path / "none", 0.0, 1) is None
    session(tmp_path, "21-21-00_1_77", raylet__err="no line of a log\n\xff")
    assert cause_in(tmp_path, 0.0, 77) is None
    session(tmp_path, "21-23-00_1_77", raylet__err=FATAL)
    assert cause_in(tmp_path, 4e9, 77) is None  # of an earlier start


@pytest.mark.parametrize(
    ("log", "late"),
    [
        ("Exception: The current node timed out during startup. This could happen because some of the raylet", True),
        ("Failed to get node info b'RPC error: Deadline Exceeded'", True),
        ("Failed to start the dashboard , return code 1", True),
        ("PermissionError: [Errno 13] Permission denied: '/root/.ray'", False),
    ],
)
def test_only_what_was_late_may_come_another_time(log: str, late: bool) -> None:
    assert is_late(log) == late


@pytest.fixture
def well(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "RAY_TMPDIR": "/tmp"}


def test_a_machine_on_which_ray_starts_has_no_problem(well: dict[str, str], tmp_path: Path) -> None:
    assert list(problems({}, well)) == []
    assert list(problems({"address": None}, {**well, "HOME": str(tmp_path / "home" / "new")})) == []
    assert list(problems({}, {**well, "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp/not/there"})) == []
    assert list((tmp_path / "home").iterdir()) == []  # nothing remains


@pytest.mark.parametrize(
    ("changes", "ray_init", "said"),
    [
        ({"HOME": "{file}"}, {}, "HOME='{file}': Ray cannot write its token to '{file}/.ray' ({file}: Not"),
        ({"HOME": "/proc/nowhere"}, {}, "HOME='/proc/nowhere': Ray cannot write its token to '/proc/nowhere/"),
        ({"HOME": "{file}", "RAY_AUTH_MODE": "token"}, {}, "HOME='{file}': Ray cannot write its token"),
        ({"RAY_AUTH_TOKEN_PATH": "{file}"}, {}, "RAY_AUTH_TOKEN_PATH='{file}' is no file with a token"),
        ({"RAY_TMPDIR": "{file}"}, {}, "RAY_TMPDIR='{file}': Ray cannot write its sessions there ({file}: Not a dir"),
        ({"RAY_TMPDIR": None, "TMPDIR": "/proc/x"}, {}, "TMPDIR='/proc/x': Ray cannot write its sessions there (/p"),
        ({}, {"_temp_dir": "/proc/x"}, "ray_kwargs.ray_init._temp_dir='/proc/x': Ray cannot write its sessions there"),
        ({"RAY_TMPDIR": "/tmp/" + 60 * "x"}, {}, "RAY_TMPDIR='/tmp/" + 60 * "x" + "': Ray's sockets there would"),
        ({"RAY_TMPDIR": "/tmp/" + 25 * "ü"}, {}, "RAY_TMPDIR='/tmp/" + 25 * "ü" + "': Ray's sockets there would"),
    ],
)  # fmt: skip
def test_what_keeps_ray_from_starting_is_named(
    changes: dict[str, str | None], ray_init: dict[str, Any], said: str, well: dict[str, str], tmp_path: Path
) -> None:
    (file := tmp_path / "file").touch()
    filled = {name: None if value is None else value.format(file=file) for name, value in changes.items()}
    environment = {name: value for name, value in {**well, **filled}.items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        require_places(ray_init, environment)
    assert str(raised.value).startswith(said.format(file=file))
    assert "; set " in str(raised.value) or "; write one" in str(raised.value)
    # A run that joins a cluster needs none of it.
    assert list(problems({"address": "10.0.0.1:6379", **ray_init}, environment)) == []
    assert list(problems(ray_init, {**environment, "RAY_ADDRESS": "10.0.0.1:6379"})) == []


@pytest.mark.parametrize("own", ["RAY_AUTH_MODE=disabled", "RAY_AUTH_TOKEN=abc", "RAY_AUTH_TOKEN_PATH={token}"])
def test_where_the_home_is_not_needed_it_is_not_looked_at(own: str, well: dict[str, str], tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("abc\n")
    name, _, value = own.format(token=token).partition("=")
    assert list(problems({}, {**well, "HOME": str(token), name: value})) == []


def test_a_token_that_is_there_is_enough(well: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / ".ray").mkdir()
    (tmp_path / "home" / ".ray" / "auth_token").write_text("abc")
    monkeypatch.setattr(ray_start, "_unwritable", lambda folder: "read-only" if "home" in str(folder) else None)
    assert list(problems({}, well)) == []


@pytest.mark.parametrize(
    ("now", "expected"), [(15.2, ("load 15 on 2 cores", True)), (5.9, ("load 6 on 2 cores", False))]
)
def test_a_machine_is_busy_by_its_load_for_a_core(
    now: float, expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (now, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load_text() == expected
