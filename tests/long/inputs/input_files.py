"""Doors that need files: a folder for a case, and a command that runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from tests.long.inputs.input_cases import Seen

ROOT = Path(__file__).parents[3]
Files = Mapping[str, str | bytes]


@contextlib.contextmanager
def variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def folder_of(files: Files) -> Iterator[Path]:
    """Make a folder with files, and work in it for a while."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="inputs-") as name:
        folder = Path(name).resolve()
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def in_folder(
    run: Callable[[Path], Seen], files: Files, changes: Mapping[str, str | None] | None = None
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a command that runs in a folder with files.

    Args:
        run: Runs it.
        files: The files, by path.
        changes: Variables of the environment.
    """

    async def door() -> Seen:
        with folder_of(files) as folder, variables(changes or {}):
            return await asyncio.to_thread(run, folder)

    return door


def in_process(*words: str, environment: Mapping[str, str | None] | None = None, before: str = "") -> Seen:
    """Run `verl-multiturn` in a process of its own, in the current folder.

    Args:
        words: Its words.
        environment: Changes of the variables.
        before: A line of Python that runs first.
    """
    program = f"{before}\nfrom verl_multiturn.cli.__main__ import main\nmain()"
    values = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    for name, value in (environment or {}).items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, env=values, timeout=120, check=False
    )
    said = (done.stdout + done.stderr).decode(errors="replace")
    return Seen("refused" if done.returncode else "accepted", sentence=said, status=done.returncode)
