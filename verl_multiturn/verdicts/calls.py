"""Tests that call functions of untrusted code from outside: the mechanism of the reward `code` and verdict `calls`.

    test → referee ──a call──▶ host ──▶ runner, with the code
              ▲ results as plain values ◀──┘

A test's code runs in one sandbox, the referee, and the untrusted code in another, the runner. The referee asks for one
call at a time, and gets its result as a number, a string, a list and the like (`program_cells.py`). So code that exits,
replaces functions, looks at its callers' variables or returns objects that equal everything passes no test.

Invariants:
- an expected value never enters a runner;
- code with a part in a test cannot keep the test from a result: it then does not pass;
- verdicts and results are values of cells, never text that a cell printed, and a sandbox that was stopped has none. A
  verdict is the referee's word, so no value that a test prints can be one. A result is the runner's word: whatever the
  code makes of it, it is a value that the code could have returned, or an error that it could have raised.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import OutageError, UnjudgedError
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import MAX_CODE_BYTES, CellResult, Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.syntax import parse_module

_CELLS = Path(__file__).with_name("program_cells.py").read_text(encoding="utf-8")


@dataclass
class CallTally:
    """Results of tests: how many passed, and whether the code was late with one."""

    passed: int = 0
    late: bool = False


class CallJudge:
    """Sandboxes of one event loop in which tests call functions.

    Args:
        settings: Those of every sandbox; its `timeout_s` is that of one call, or of one look at a test.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._pool = SandboxPool(settings)

    async def close(self) -> None:
        """End every sandbox."""
        await self._pool.aclose()

    def close_now(self) -> None:
        """Kill every sandbox at once, without an await; for where the event loop has ended."""
        self._pool.close_now()

    async def sandbox(self) -> Sandbox:
        """Return a new sandbox that has the functions of `program_cells.py`; the caller ends it with `kill`.

        Raises:
            OutageError: It could not be started (`SandboxError`) or prepared.
        """
        sandbox = await self._pool.acquire()
        try:
            expect_done(await sandbox.run(_CELLS))
        except BaseException:  # also a cancellation: nothing else would end the sandbox
            sandbox.kill()
            raise
        return sandbox

    async def run_tests(
        self,
        tests: Sequence[str],
        prepare: Callable[[Sandbox], Awaitable[None]],
        tally: CallTally,
        all_or_nothing: bool = True,
    ) -> None:
        """Run tests one after the other, and count in `tally` those that passed.

        Args:
            tests: The code of each one. Names that neither it nor Python defines are functions of the untrusted code.
            prepare: Brings the untrusted code into a new runner. It is called again when the code has ended its runner.
            tally: Is added to.
            all_or_nothing: Whether to stop at the first test that does not pass.

        Raises:
            UnjudgedError: A test hands over a value that cannot be sent to another sandbox, or there is no verdict on
                it, although nothing of the untrusted code is in it yet.
            OutageError: A sandbox could not be started (`SandboxError`) or prepared.
        """
        runner: Sandbox | None = None
        referee = await self.sandbox()
        try:
            for code in tests:
                results: list[str] = []
                while True:
                    if runner is None or runner.stopped is not None:
                        runner = await self.sandbox()
                        await prepare(runner)
                    verdict = await _ask_referee(referee, code, results, tally)
                    if verdict[0] != "call":
                        break
                    request = json.dumps(verdict[1:], ensure_ascii=False)
                    result = await runner.run(f"call({request!r})", with_value=True)
                    tally.late = tally.late or is_late(result)
                    if not result.value:
                        break
                    # The runner's output is the code's own word, and is read in the referee only.
                    results.append(result.value.decode("utf-8", "replace"))
                if verdict == ["pass"]:
                    tally.passed += 1
                elif all_or_nothing:
                    return
                if referee.stopped is not None:
                    referee = await self.sandbox()
        finally:
            referee.kill()
            if runner is not None:
                runner.kill()


async def _ask_referee(referee: Sandbox, code: str, results: list[str], tally: CallTally) -> list[Any]:
    """Return the verdict on a test whose calls have the given results, as `program_cells.judge` defines it.

    A referee that was stopped, or that has no verdict, has found the code wrong.
    """
    cell, verdict, problem = _cell(code, results), [], "it is too long"
    if _fits(cell):  # otherwise the code returns too much
        result = await referee.run(cell, with_value=True)
        tally.late = tally.late or is_late(result)
        verdict, problem = _read_verdict(result.value), result.stopped or "it has no verdict"
    if verdict[:1] == ["unsuitable"] and not results:
        raise UnjudgedError(f"a test hands over {verdict[1]}: {code[:200]!r}; write it with plain values")
    if not verdict and not results:
        raise UnjudgedError(f"a test cannot be judged: {problem}: {code[:200]!r}; mend the test")
    if not verdict or verdict[0] == "unsuitable":  # the results may have led to it
        return ["fail"]
    return verdict


def fits_a_cell(code: str, results: Sequence[str]) -> bool:
    """Return whether the referee can be given a test with the results of its calls.

    Args:
        code: The test.
        results: The results so far, as the runner sends them.

    Raises:
        SyntaxError: The test is not Python.
    """
    return _fits(_cell(code, results))


def _cell(code: str, results: Sequence[str]) -> str:
    return f"judge({code!r}, {free_names(code)!r}, {list(results)!r})"


def _fits(cell: str) -> bool:
    return len(cell.encode("utf-8", "replace")) <= MAX_CODE_BYTES


def _read_verdict(value: bytes) -> list[Any]:
    try:
        verdict = json.loads(value)
    except ValueError:
        return []
    return verdict if isinstance(verdict, list) else []


def free_names(code: str) -> list[str]:
    """Return the names in a test that may be functions of the untrusted code; its own definitions replace them.

    Args:
        code: The test.

    Raises:
        SyntaxError: It is not Python.
    """
    names = {node.id for node in ast.walk(parse_module(code)) if isinstance(node, ast.Name)}
    return sorted(name for name in names if not hasattr(builtins, name) and name != "same")


def is_late(result: CellResult) -> bool:
    """Return whether a cell was stopped because its time was up."""
    return result.stopped is not None and result.stopped.startswith("the code was stopped after")


def expect_done(ours: CellResult) -> None:
    """Raise OutageError when one of our own cells was stopped, which is not evidence about the untrusted code."""
    if ours.stopped is not None:
        raise OutageError(f"a sandbox could not be prepared: {ours.stopped}")
