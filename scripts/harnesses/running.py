"""One program against one session: start it, wait for its end, account for the session."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.harnesses.policies import FILE
from scripts.harnesses.programs import Endpoint, Program
from scripts.harnesses.serving import serve
from verl_multiturn.chat.template import Template

_SHOWN = 2000


async def run_program(program: Program, template: Template, deadline_s: float) -> dict[str, Any]:
    """Run a program, and return its outcome and that of its session.

    Args:
        program: The program.
        template: The model's template.
        deadline_s: Seconds after which it is killed.

    Returns:
        The session's numbers; `tool_ran`: whether the answer of a real tool came back to the model, and out of the
        program at its end; `exit`: its exit status.

    Raises:
        RuntimeError: The program is not there.
    """
    lot = f"lot-{secrets.token_hex(5)[:9]}"
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder = Path(name)
        for each in ("home", "work"):
            (folder / each).mkdir()
        padding = "".join(f"line {number} of the padding\n" for number in range(program.padding))
        (folder / "work" / FILE).write_text(f"{lot}\n{padding}", encoding="utf-8")
        async with serve(template, program.policy) as served:
            began = time.monotonic()
            status, printed, said = await _run(program, folder, Endpoint(served.root, served.key), deadline_s)
            seconds = time.monotonic() - began
            account = await served.account()
    came_back = any(lot in turn.prompt for turn in served.turns)
    report = {**account.counts, "tool_ran": came_back and lot in printed, "exit": status, "seconds": round(seconds, 1)}
    report["generations"] = len(served.turns)
    wrong = [*account.violations, *account.refused]
    if status or wrong or not report["tool_ran"]:
        report["problem"] = "\n".join([*wrong[:3], printed[-_SHOWN:], said[-_SHOWN:]])
    return report


async def _run(program: Program, folder: Path, endpoint: Endpoint, deadline_s: float) -> tuple[int, str, str]:
    """Run a program in a group of its own; return its exit status and its text, as output and as errors.

    Its group is killed at the end, so that nothing of it remains. A program that is not done in time has the status of
    a killed one.
    """
    environment = program.environ(folder / "home", endpoint)
    found = shutil.which(program.command[0], path=environment["PATH"])
    if found is None:
        raise RuntimeError(f"{program.command[0]!r} is not in {program.environment.programs}; remove that environment")
    # Files, since a pipe would stay open as long as some child that went its own way.
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            found,
            *program.command[1:],
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    ending = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ending}, timeout=deadline_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = await ending
    return (
        status,
        output.read_text(errors="replace", encoding="utf-8"),
        errors.read_text(errors="replace", encoding="utf-8"),
    )
