"""Closing of the tools of one process, which releases what their conversations share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that all tools of a process together may take to close."""


async def close_tools(tools: Mapping[str, Any]) -> None:
    """Close all tools at the same time, by the method `aclose` of each that has one.

    An error is logged. A tool that is not closed within `CLOSE_S` is cancelled and no longer waited for.

    Args:
        tools: The tools by name.
    """
    closing = {
        asyncio.ensure_future(_close(name, tool.aclose)) for name, tool in tools.items() if hasattr(tool, "aclose")
    }
    if not closing:
        return
    _, late = await asyncio.wait(closing, timeout=CLOSE_S)
    for left in late:
        left.cancel()
    if late:
        logger.warning("%d of %d tools did not close within %g s", len(late), len(closing), CLOSE_S)


async def _close(name: str, aclose: Any) -> None:
    try:
        await aclose()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a tool's own code; a SystemExit would end the loop
        logger.warning("tool %r: aclose raised %s", name, describe(error))
