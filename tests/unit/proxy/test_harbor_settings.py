"""Rows, tasks and settings of the bridge to Harbor, as far as they are looked at without Harbor."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.workspace_attacks import ATTACKS
from verl_multiturn.config import HarborSettings, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.trials.definition import read_definition
from verl_multiturn.harnesses.harbor.trials.runner import HarborRunner, check_harbor, task_of
from verl_multiturn.harnesses.runners import build_runner, check_agent


def made(folder: Path, dockerfile: str = "FROM scratch\n", toml: str = "") -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data.txt").write_text("x")
    (folder / "task.toml").write_text(toml)
    return folder


def row(harbor: Any) -> dict[str, Any]:
    return {"extra_info": {"harbor": harbor}}


def test_a_row_names_a_folder_or_what_harbor_fetches(tmp_path: Path) -> None:
    task = made(tmp_path / "t")
    assert task_of(row(str(task))) == {"path": str(task)}
    assert task_of(row({"path": str(task)})) == {"path": str(task)}
    assert task_of(row({"name": "org/task", "ref": "latest"})) == {"name": "org/task", "ref": "latest"}
    fetched = {"git_url": "https://host/repository", "path": "tasks/a"}
    assert task_of(row(fetched)) == fetched


@pytest.mark.parametrize("named", [None, 7, {}, {"path": "x", "pathe": "y"}, {"ref": "latest"}, "/no/such/task"])
def test_a_row_that_names_no_task_is_refused(named: object) -> None:
    with pytest.raises(ConfigError, match=r"extra_info\.harbor of a data row is "):
        task_of(row(named))


def test_what_a_workspace_understands_of_a_dockerfile(tmp_path: Path) -> None:
    task = made(
        tmp_path / "t",
        "# a comment\nFROM scratch\nWORKDIR /srv\nWORKDIR in\nENV A=1 B='two words'\nCOPY data.txt . \n"
        "COPY data.txt \\\n  /data/\ncopy . /all\nCOPY data.txt /data\nCOPY data.txt ../in/x.txt\n",
    )
    definition = read_definition(task / "environment", None)
    assert definition.workdir == "/srv/in"
    assert definition.variables == {"A": "1", "B": "two words"}
    assert definition.copies == [
        ("data.txt", "/srv/in"),
        ("data.txt", "/data/data.txt"),
        (".", "/all"),
        ("data.txt", "/data"),  # a folder by now
        ("data.txt", "/srv/in/x.txt"),
    ]


@pytest.mark.parametrize(
    "dockerfile",
    ["FROM ubuntu:24.04", "FROM scratch\nRUN true", "FROM scratch\nCOPY ../secret /x", "FROM scratch AS a", "ENV A 1"],
)
def test_a_task_that_needs_an_image_is_refused_in_a_workspace(tmp_path: Path, dockerfile: str) -> None:
    task = made(tmp_path / "t", dockerfile)
    with pytest.raises(ConfigError, match="the task needs an image, which the embedded sandbox cannot run"):
        read_definition(task / "environment", None)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("WORKDIR /", "its commands start in '/', expected a folder below the root"),
        ("WORKDIR /app\nWORKDIR ..", "its commands start in '/', expected a folder below the root"),
        ("COPY data.txt /", "its Dockerfile says 'COPY data.txt /', and a workspace has only folders at the root"),
        ("COPY data.txt /x", "its Dockerfile says 'COPY data.txt /x', and a workspace has only folders at the root"),
        ("COPY data.txt ../x", "its Dockerfile says 'COPY data.txt ../x', and a workspace has only folders at the"),
        ("WORKDIR /app\nCOPY . ..", "its Dockerfile says 'COPY . ..', and a workspace has only folders at the root"),
    ],
)
def test_a_task_at_the_root_is_refused_in_a_workspace(tmp_path: Path, lines: str, why: str) -> None:
    task = made(tmp_path / "t", f"FROM scratch\n{lines}\n")
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_definition(task / "environment", None)
    task = made(tmp_path / "u", "FROM scratch\nWORKDIR /\nWORKDIR in\n", toml="[environment]\nworkdir = '/'")
    assert read_definition(task / "environment", None).workdir == "/in"
    with pytest.raises(ConfigError, match="its commands start in '/'"):
        HarborRunner(HarborSettings(environment="workspace"), sys.executable)._look_at({"path": str(task)})


def test_images_by_name_and_compose_are_refused_in_a_workspace(tmp_path: Path) -> None:
    task = made(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"'python:3\.12'"):
        read_definition(task / "environment", "python:3.12")
    (task / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(ConfigError, match="docker-compose"):
        read_definition(task / "environment", None)


def test_a_task_judged_where_its_agent_worked_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = made(tmp_path / "shared", toml="[verifier]\nenvironment_mode = 'shared'")
    separate = made(tmp_path / "separate", toml="[verifier]\nenvironment_mode = 'separate'")
    own = made(tmp_path / "own", toml="[verifier.environment]\ncpus = 1")
    runner = HarborRunner(HarborSettings(environment="workspace"), sys.executable)
    with caplog.at_level(logging.WARNING):
        for task in (separate, own, shared, shared):
            runner._look_at({"path": str(task)})
    [said] = caplog.messages
    assert str(shared) in said
    attacks = json.loads((ROOT / "benchmarks" / "results" / "workspace_attacks.json").read_text())
    paid = len(ATTACKS), attacks["control_paid"], attacks["paid"]["script"]
    assert re.findall(r"Of (\d+) attacks .* paid (\d+), .* one (\d+);", said) == [tuple(map(str, paid))]


def test_a_task_with_an_image_ends_the_run_in_a_workspace(tmp_path: Path) -> None:
    task = made(tmp_path / "t", toml="[environment]\ndocker_image = 'python:3.12'")
    HarborRunner(HarborSettings(environment="docker"), sys.executable)._look_at({"path": str(task)})
    with pytest.raises(ConfigError, match=r"'python:3\.12'"):
        HarborRunner(HarborSettings(environment="workspace"), sys.executable)._look_at({"path": str(task)})


def test_harbor_needs_its_own_python() -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs Harbor's own Python 3\.12; run `verl-multiturn install harbor DIR`",
    ):
        check_agent(ProxySettings(agent="harbor"))
    with pytest.raises(ConfigError, match="'/no/such/python'"):
        check_agent(ProxySettings(agent="harbor", python="/no/such/python"))
    with pytest.raises(ConfigError, match="leave 'command' and 'runner' out"):
        check_agent(ProxySettings(agent="harbor", python=sys.executable, runner="thread"))


def test_a_python_without_harbor_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    with pytest.raises(ConfigError, match=r"its Harbor is not installed, expected .* 0\.25\.0; run `verl-mult"):
        check_harbor(HarborSettings(), str(tmp_path / "venv" / "bin" / "python"))


def test_the_runner_of_harbor() -> None:
    assert isinstance(build_runner(ProxySettings(agent="harbor", python=sys.executable)), HarborRunner)
