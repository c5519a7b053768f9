"""Closing of the tools and interactions of one process, which releases what their conversations share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from verl_multiturn.calls.invocation import Invocation, is_coroutine_method, task_name
from verl_multiturn.calls.tasks import Alarms
from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that all tools and interactions of a process together may take to close."""


async def close_all(owners: Iterable[Any]) -> None:
    """Close tools and interactions at the same time, by the method `aclose` of each that has one.

    An error is logged. An object not closed within `CLOSE_S` is cancelled and no longer awaited.

    Args:
        owners: The tools and interactions; each has a `name`.
    """
    closing = {asyncio.ensure_future(_close(owner)) for owner in owners if hasattr(owner, "aclose")}
    if not closing:
        return
    _, late = await asyncio.wait(closing, timeout=CLOSE_S)
    for left in late:
        left.cancel()
    if late:
        logger.warning("%d of %d tools did not close within %g s", len(late), len(closing), CLOSE_S)


async def _close(owner: Any) -> None:
    try:
        if is_coroutine_method(owner.aclose):
            await owner.aclose()
        else:  # only an interaction's; in a thread of its own, since it may block
            invocation = Invocation(owner.aclose, False, (), {}, task_name("interaction", owner.name, "aclose"))
            await invocation.ended(Alarms(CLOSE_S))
            invocation.result()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # an author's own code; a SystemExit would end the loop
        logger.warning("%r: aclose raised %s", owner.name, describe(error))
