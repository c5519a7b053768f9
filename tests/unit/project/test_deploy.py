"""The image and the release workflow name commands, files and options that there are. Neither is run here."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from verl_multiturn import __version__, install
from verl_multiturn.cli.commands import COMMANDS

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
_INSTRUCTIONS = {"FROM", "RUN", "COPY", "ENV"}
WHEEL = f"verl_multiturn-{__version__}-py3-none-any.whl"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with its words, as docker reads the lines."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(first, rest) for first, _, rest in (line.partition(" ") for line in whole.splitlines() if line.strip())]


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def shell_commands() -> list[str]:
    steps = [step for job in jobs().values() for step in job["steps"]]
    return [words for name, words in instructions() if name == "RUN"] + [step["run"] for step in steps if "run" in step]


def test_the_image_is_made_by_known_instructions() -> None:
    assert next(name for name, _ in instructions()) == "FROM"
    assert {name for name, _ in instructions()} == _INSTRUCTIONS
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name, words in instructions():
        if name == "COPY":
            source, _ = words.split()
            assert f"!{source.split('/')[0]}" in ignored  # all else is left out
            assert re.fullmatch(source.split("/")[1].replace("*", ".*"), WHEEL)


@pytest.mark.parametrize("command", shell_commands())
def test_a_shell_can_read_each_command(command: str) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_image_installs_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = re.findall(r"verl_multiturn\.install (.*?) &&", " ".join(shell_commands()))
    given: list[Any] = []
    monkeypatch.setattr(install, "install", lambda *arguments: given.extend(arguments))
    assert install.main(shlex.split(words)) == 0
    assert given == ["gpu", "/opt/venv", "", [], "", False, False]
    assert "gpu" in install.environments()
    path = dict(instructions())["ENV"]
    assert path == "PATH=/opt/venv/bin:$PATH"


def test_the_workflow_names_commands_that_there_are() -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    assert set(re.findall(r"verl-multiturn ([a-z-]+)", text)) <= set(COMMANDS)
    assert {step["uses"] for step in jobs()["wheel"]["steps"] if "uses" in step} == {
        "actions/checkout@v4",
        "actions/setup-python@v5",
    }
    (python,) = [step["with"] for step in jobs()["wheel"]["steps"] if "with" in step]
    minor = int(python["python-version"].split(".")[1])
    assert minor >= 11  # setup.py's own bound
    for pattern in re.findall(r"dist/(verl_multiturn-\S+)", text):
        assert re.fullmatch(pattern.replace("*", ".*"), WHEEL)


def test_neither_uploads_to_a_registry() -> None:
    for path in (DOCKERFILE, WORKFLOW):
        assert "://" not in path.read_text(encoding="utf-8")
        assert "twine" not in path.read_text(encoding="utf-8")
