"""`EngineOfServer`: lets a training worker go through an update of the weights although its server has died.

`AsyncSGLangRollout` (`loops/spmd.py`) puts it around verl's HTTP adapter of the generation server. All training workers
gather the weights together, before one of them sends them to its server. A worker that raised because its server is
dead would leave the others in that collective call, and the run would hang. With this adapter it takes part as before
and sends nothing. The trainer finds the dead server by itself (`trainer/servers.py`), and replaces it or ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

# Seconds in which Ray reports whether an actor is alive.
_TOLD_S = 60.0
# Answers of a dead server whose content verl reads: it asks for the adapters before it sends a new one.
_EMPTY: dict[str, Any] = {"available_models": {"data": []}}


class EngineOfServer:
    """The adapter's asynchronous methods. Once the server has died they return an empty answer.

    An error of a server that lives, or that does not answer, is raised.

    Args:
        adapter: verl's HTTP adapter.
        server: Ray handle of the server; None: it has died already.
    """

    def __init__(self, adapter: Any, server: Any) -> None:
        self._adapter = adapter
        self._server = server
        self._lost = server is None

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._lost:
                return dict(_EMPTY.get(name, {}))
            try:
                return await getattr(self._adapter, name)(*args, **kwargs)
            except Exception as error:  # of any HTTP client
                try:
                    await asyncio.wait_for(self._server.__ray_ready__.remote(), _TOLD_S)
                except RayActorError:
                    self._lost = True
                    logger.warning("%s was not sent, the server has died: %s", name, describe(error))
                    return dict(_EMPTY.get(name, {}))
                raise

        return call
