"""Ray's start on one machine, without the processes that a run there does not use."""

from __future__ import annotations

import functools
from typing import Any

import wrapt
from ray._private import node, parameter

from verl_multiturn.cpu_processes.handle import SETUP_WORKER


@functools.cache
def shorten_start() -> None:
    """Let the Ray that this process starts do without needless waits.

    It starts no autoscaler, which has no machines to add. It starts no server for a dashboard that was switched off:
    Ray would wait a second for it, to report usage. Its workers are set up by our program, which does not import Ray.
    """
    wrapt.wrap_function_wrapper(parameter.RayParams, "__init__", _with_less)
    wrapt.wrap_function_wrapper(node.Node, "start_api_server", _if_wanted)


def _with_less(wrapped: Any, params: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    wrapped(*args, **options)
    params.no_monitor = True
    params.update_if_absent(setup_worker_path=str(SETUP_WORKER))


def _if_wanted(wrapped: Any, started: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if options["include_dashboard"] is False:
        started._webui_url = ""
    else:
        wrapped(*args, **options)
