"""`write_folder`: write a task in Harbor's form, whose tests run in an environment of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_multiturn.errors import ConfigError


@dataclass(frozen=True)
class HarborTask:
    """The content of a task's folder.

    Attributes:
        instruction: The text for the model.
        environment: Files of the folder `environment` by their path, the Dockerfile among them.
        tests: Files of the folder `tests`, `test.sh` among them.
        solution: The text of `solution/solve.sh`; empty where there is none.
        artifacts: Paths in the agent's environment that are taken to the tests.
        collect: A command that runs in the agent's environment before that; empty for none.
        agent_s: Seconds of the agent.
        verifier_s: Seconds of the tests.
        network: Whether the agent's environment has a network. That of the tests has none.
        source: Where the task is from, for a reader: words by name.
    """

    instruction: str
    environment: Mapping[str, str]
    tests: Mapping[str, str]
    solution: str
    artifacts: Sequence[str]
    collect: str = ""
    agent_s: float = 3_600.0
    verifier_s: float = 600.0
    network: bool = False
    source: Mapping[str, str] = field(default_factory=dict)


def write_folder(path: Path, task: HarborTask) -> None:
    """Write a task's folder, in the place of one that is there.

    Args:
        path: The folder; its name is the task's.
        task: Its content.

    Raises:
        ConfigError: There is something else at that path, or it cannot be written.
    """
    files = {"task.toml": _settings(path.name, task), "instruction.md": task.instruction.strip() + "\n"}
    files |= {f"environment/{name}": text for name, text in task.environment.items()}
    files |= {f"tests/{name}": text for name, text in task.tests.items()}
    if task.solution:
        files["solution/solve.sh"] = task.solution
    try:
        if (path / "task.toml").is_file():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (path / name).chmod(0o755)
    except OSError as error:
        raise ConfigError(f"the task {str(path)!r} cannot be written: {error}; name a new folder") from None


def _settings(name: str, task: HarborTask) -> str:
    lines = [
        'schema_version = "1.4"',
        f"artifacts = [{', '.join(map(_text, task.artifacts))}]",
        "",
        "[task]",
        f"name = {_text(f'made/{name.lower()}')}",
        'version = "1.0.0"',
    ]
    if task.source:
        lines += ["", "[metadata]", *(f"{key} = {_text(value)}" for key, value in task.source.items())]
    lines += ["", "[agent]", f"timeout_sec = {task.agent_s}"]
    lines += ["", "[environment]", f'network_mode = "{"public" if task.network else "no-network"}"']
    lines += ["", "[verifier]", f"timeout_sec = {task.verifier_s}", 'environment_mode = "separate"']
    if task.collect:
        lines += ["", "[[verifier.collect]]", f"command = {_text(task.collect)}", "timeout_sec = 120.0"]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Return a text as TOML's basic strings have it, which is as in JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
