"""The end of the tools of one process: what their conversations share is closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long the tools of a process may take to close, all together."""


async def close_tools(tools: Mapping[str, Any]) -> None:
    """Call `aclose` of each tool that has one, at once; what it raises is logged, what is late is left."""
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
