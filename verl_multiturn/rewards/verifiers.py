"""Verifiers of other packages, which run in processes that can be killed (`verify_worker.py`).

A verifier that fails is tried with the right answer itself. If it fails with that, too, the answer is not to blame.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.processes.pool import WorkerEndedError, WorkerError, WorkerPool, WorkerStartError
from verl_multiturn.rewards.resources import shared
from verl_multiturn.rewards.score import RewardOptions, TruthError

T = TypeVar("T")

_WORKER = Path(__file__).parents[1] / "processes" / "verify_worker.py"


class VerifierOptions(RewardOptions):
    """Options of rewards whose verifier is another package's."""

    timeout_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds for one answer; a later answer has timed out, and its process is killed."""

    max_memory_mb: int = Field(default=2048, ge=512)
    """Memory of one process in megabytes, counted as address space."""

    processes: int = Field(default=2, gt=0)
    """Answers that are verified at once in each of verl's reward workers; further ones wait."""


async def verify(
    package: str, request: dict[str, Any], control: dict[str, Any] | None, options: VerifierOptions
) -> float:
    """Return the score that a package's verifier gives an answer.

    Args:
        package: `math_verify` or `reasoning_gym`.
        request: The answer and its references, as `verify_worker.py` reads it.
        control: The same with the right answer in the answer's place; None: there is none.
        options: Limits of the process.

    Raises:
        ConfigError: The package is not installed, or does not know the data set in the request.
        TimeoutError: The verifier took too long.
        WorkerError: The verifier raised an error or could not judge, or its process ended, with this answer alone.
        TruthError: It cannot judge the right answer either.
        OutageError: Its process does not live, whatever the answer is.
    """
    pool = shared((package, options), lambda: _open(package, options))
    return await judge_or_blame(lambda: _ask(pool, request), None if control is None else lambda: _ask(pool, control))


async def judge_or_blame(judge: Callable[[], Awaitable[T]], control: Callable[[], Awaitable[object]] | None) -> T:
    """Return a verdict; where there is none, report whether the answer is to blame.

    A process that ended is tried once more: it may have been killed from outside.

    Args:
        judge: Judges the answer, and may be called twice.
        control: Judges the right answer; None: there is none.

    Raises:
        WorkerError: There is no verdict on this answer alone.
        TruthError: There is none on the right answer either.
        OutageError: The process does not live, whatever the answer is.
        TimeoutError: The verdict is late.
    """
    try:
        try:
            return await judge()
        except WorkerEndedError:
            return await judge()
    except WorkerError as error:
        if control is None:
            if isinstance(error, WorkerStartError):
                raise OutageError(f"no answer can be judged: {error}") from error
            raise
        try:
            await control()
        except WorkerEndedError as other:
            raise OutageError(f"no answer can be judged, not even the right one: {other}") from error
        except (WorkerError, TimeoutError) as other:
            raise TruthError(f"the right answer cannot be judged either: {other or 'it is late'}") from error
        raise


async def _ask(pool: WorkerPool, request: dict[str, Any]) -> float:
    answer = await pool.ask(request)
    if "unknown" in answer:
        raise ConfigError(str(answer["unknown"]))
    if "error" in answer:
        raise WorkerError(str(answer["error"]))
    return float(answer["value"])


def _open(package: str, options: VerifierOptions) -> WorkerPool:
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise ConfigError(f"this reward needs the package {package!r}, which is not installed; pip install {name}")
    arguments = {
        "package": package,
        "path": [entry for entry in sys.path if entry],
        "timeout_s": options.timeout_s,
        "max_memory_bytes": options.max_memory_mb * 2**20,
    }
    return WorkerPool(
        _WORKER, arguments, timeout_s=options.timeout_s, processes=options.processes, python=("-I", "-S", "-B")
    )
