"""The bridge's requests to a container engine: a program of ours in its place answers as podman and docker do."""

import json
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_multiturn.harnesses.harbor.trials import engines
from verl_multiturn.harnesses.harbor.trials.engines import (
    disk_problem,
    ensure_image,
    kill_container,
    lost_container,
    sweep,
)
from verl_multiturn.harnesses.owners import is_left, owner

_ENGINE = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$*" in
{cases}
*) exit 0 ;;
esac
"""


class Engine:
    """A program on the PATH that answers by the cases."""

    name = "made-engine"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def says(self, **cases: str) -> None:
        """Take the shell text to run for a beginning of the arguments, whose blanks are underscores."""
        lines = "\n".join(f'"{begin.replace("_", " ")}"*) {text} ;;' for begin, text in cases.items())
        path = self._folder / self.name
        path.write_text(_ENGINE.format(folder=self._folder, cases=lines))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return Engine(tmp_path)


def test_a_process_that_is_no_more_leaves_its_projects() -> None:
    mine = owner()
    assert not is_left(f"{mine}7__env")
    machine, process, started = mine.rstrip("-").split("-")[1:]
    assert is_left(f"vmt-{machine}-{process}-{int(started) + 1}-7__env")
    assert not is_left(f"vmt-00000000-{process}-{int(started) + 1}-7__env")  # of another machine
    assert not is_left("somebody-else")


def labelled(engine: Engine, containers: dict[str, str], networks: dict[str, str] | None = None) -> None:
    """Let the engine have containers and networks, each with the project that it belongs to."""
    label = "com.docker.compose.project"
    cases = {"ps_": f"echo {' '.join(containers)}", "network_ls": f"echo {' '.join(networks or {})}"}
    for name, project in containers.items():
        cases[f"container_inspect_{name}"] = f"echo '{json.dumps([{'Config': {'Labels': {label: project}}}])}'"
    for name, project in (networks or {}).items():
        cases[f"network_inspect_{name}"] = f"echo '{json.dumps([{'labels': {label: project}}])}'"
    engine.says(**cases)


def test_what_is_left_is_removed_and_nothing_else(engine: Engine) -> None:
    machine = owner().split("-")[1]
    dead, mine = f"vmt-{machine}-{os.getpid()}-1-0__env", f"{owner()}3__env"
    labelled(engine, {"c1": dead, "c2": mine, "c3": "other"}, {"n1": dead, "n2": mine})
    assert sweep(engine.name) == 1
    assert [line for line in engine.asked if " rm " in line] == ["container rm --force c1", "network rm --force n1"]


def test_the_containers_of_one_trial_are_removed(engine: Engine) -> None:
    labelled(engine, {"c1": f"{owner()}3__env", "c2": f"{owner()}31__env"})
    assert sweep(engine.name, f"{owner()}3_") == 1
    assert [line for line in engine.asked if " rm " in line] == ["container rm --force c1"]


def test_an_engine_that_fails_has_nothing_to_remove(engine: Engine) -> None:
    engine.says(ps="exit 1")
    assert sweep(engine.name) == 0
    assert sweep("no-such-engine-anywhere") == 0


def described(name: str, project: str, service: str = "main", **more: object) -> str:
    """Return the shell text that prints an engine's output on a container."""
    labels = {"com.docker.compose.project": project, "com.docker.compose.service": service}
    return f"echo '{json.dumps([{'Id': name, 'Config': {'Labels': labels}, **more}])}'"


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ({"Running": True, "ExitCode": 0}, ""),
        ({"Running": False, "ExitCode": 137, "OOMKilled": False}, "outside"),
        ({"Running": False, "ExitCode": 137, "OOMKilled": True}, "inside"),
        ({"Running": False, "ExitCode": 0}, "inside"),
        ({"Running": False, "ExitCode": 143}, "inside"),
        ({"Running": False, "ExitCode": 0, "Status": "exited"}, "inside"),
        ({"Running": False, "ExitCode": 0, "Status": "created"}, "outside"),
        ({"Running": False, "ExitCode": 0, "Status": "initialized"}, "outside"),
    ],
)
def test_who_ended_a_container(engine: Engine, state: dict[str, object], lost: str) -> None:
    one = described("c1", "p", State=state)
    engine.says(ps="echo c1 c2", container_inspect_c1=one, container_inspect_c2=described("c2", "another", State={}))
    assert lost_container(engine.name, "p") == lost
    assert "label=com.docker.compose.project=p" in engine.asked[0]


def test_a_container_that_is_not_there_was_removed_from_outside(engine: Engine) -> None:
    engine.says(ps="true")
    assert lost_container(engine.name, "p") == "outside"


def test_an_engine_that_does_not_answer_says_nothing_of_a_container(engine: Engine) -> None:
    engine.says(ps="exit 125")
    assert lost_container(engine.name, "p") == "engine"


def test_a_container_is_killed_and_not_waited_for(engine: Engine) -> None:
    # An engine may also list containers of another trial, or another service.
    engine.says(
        ps="echo c1 c2 c3",
        container_inspect_c1=described("c1", "p"),
        container_inspect_c2=described("c2", "another"),
        container_inspect_c3=described("c3", "p", service="db"),
    )
    kill_container(engine.name, "p")
    assert [line for line in engine.asked if line.startswith("kill")] == ["kill c1"]


def test_the_disk_is_looked_at(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.says(info="echo /tmp/no-such-folder/of-an-engine")
    for free_gb, expected in ((10.1, ""), (9.9, "has 9.9 GB left for images and containers, expected 10; make room")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free_gb * 1e9: SimpleNamespace(free=free))
        assert disk_problem(engine.name).removeprefix("/tmp ") == expected
    engine.says(info="echo no daemon >&2; exit 1")
    assert "no daemon" in disk_problem(engine.name)


def test_an_image_is_pulled_once_and_only_if_it_is_not_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.says(image_inspect="exit 0")
    ensure_image(engine.name, "a:1")
    assert not [line for line in engine.asked if line.startswith("pull")]
    engine.says(image_inspect="exit 1", pull="exit 0")
    ensure_image(engine.name, "a:1")
    assert "pull a:1" in engine.asked
    engine.says(image_inspect="exit 1", pull="echo no such image >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"'a:1' is not there and cannot be pulled: no such image"):
        ensure_image(engine.name, "a:1")


def test_an_engine_that_hangs_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_ASK_S", 0.01)
    engine.says(ps="exec sleep 60")
    assert sweep(engine.name) == 0
