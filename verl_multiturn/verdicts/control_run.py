"""`after_control`: whose doing a run without a verdict is, found by a run of the same tests on the untouched original.

A model's code can make a run late, or end it in the middle. Where the same tests come to a verdict on the original, it
has done that, and the reward is 0. Where they do not, the cause is unknown. So a model cannot choose to be invalid.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from verl_multiturn.errors import UnjudgedError

Run: TypeAlias = Callable[[], Awaitable[tuple[float, str]]]
"""Runs the tests once; returns the reward, and why that is not 1."""


class DisturbedError(Exception):
    """A run came to no verdict: it was late, ended in the middle, or its output cannot be read.

    Whether the model's code did that is tried on the untouched original (`after_control`).
    """


async def after_control(name: str, run: Run, control: Run) -> tuple[float, str]:
    """Return the reward of a run, 0 where it has no verdict and the control run has one; and why it is not 1.

    Args:
        name: The task's name, for the error.
        run: Runs the tests on the agent's work.
        control: Runs the same tests on the untouched original.

    Raises:
        UnjudgedError: Neither run comes to a verdict.
    """
    try:
        return await run()
    except DisturbedError as error:
        try:
            await control()
        except DisturbedError as own:
            raise UnjudgedError(f"task {name!r}: its untouched tree cannot be judged either: {own}") from None
        return 0.0, str(error)
