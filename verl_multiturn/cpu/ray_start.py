"""Ray's start on one machine, without the processes that a run there does not use, and however busy the machine is."""

from __future__ import annotations

import functools
import time
from typing import Any

import wrapt
from ray._private import node, parameter, services
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from verl_multiturn.cpu_processes.handle import SETUP_WORKER

RAYLET_S = 300.0
"""Seconds in which a raylet has to be ready. Ray itself gives it 30, in which a busy machine may not start it."""


@functools.cache
def adapt_start() -> None:
    """Let the Ray that this process starts do without needless waits, and wait for a slow raylet; for the CPU platform.

    It starts no autoscaler, which has no machines to add. It starts no server for a dashboard that was switched off:
    Ray would wait a second for it, to report usage. Its workers are set up by our program, which does not import Ray.
    """
    wrapt.wrap_function_wrapper(parameter.RayParams, "__init__", _with_less)
    wrapt.wrap_function_wrapper(node.Node, "start_api_server", _if_wanted)
    wrapt.wrap_function_wrapper(node.Node, "start_ray_processes", _until_ready)


def _with_less(wrapped: Any, params: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    wrapped(*args, **options)
    params.no_monitor = True
    params.update_if_absent(setup_worker_path=str(SETUP_WORKER))


def _if_wanted(wrapped: Any, started: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if options["include_dashboard"] is False:
        started._webui_url = ""
    else:
        wrapped(*args, **options)


def _until_ready(wrapped: Any, started: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    wrapped(*args, **options)
    raylet = started.all_processes[PROCESS_TYPE_RAYLET][0].process
    end = time.monotonic() + RAYLET_S
    while raylet.poll() is None and time.monotonic() < end:  # Ray itself reports one that has died
        try:
            services.get_node(started.gcs_address, started.node_id)
            return
        except RuntimeError:  # it has not registered yet
            time.sleep(0.1)
