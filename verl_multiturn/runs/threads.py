"""How many threads of OpenMP each process of a run on the CPU gets, where the user has set no number."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.paths import read_regular

CHOSEN = "VERL_MULTITURN_THREADS"
"""Environment variable with the number that `thread_variables` chose, to distinguish it from one that the user set."""

_SMALL = 256
"""Largest hidden size of a model that one thread computes as fast as two (`benchmarks.threads`)."""


def thread_variables(config: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set the threads of a run on the CPU; for `environment_of`.

    There are none where the user has set OMP_NUM_THREADS, and where each process may use all cores.

    Args:
        config: The run's composed configuration, as plain values.
        environment: The environment variables of the run's processes.
    """
    if environment.get("OMP_NUM_THREADS"):
        return {}
    trainer = config.get("trainer") or {}
    if _is_small((config.get("actor_rollout_ref") or {}).get("model") or {}):
        threads = 1
    elif str((trainer.get("v1") or {}).get("trainer_mode")).endswith("separate_async"):  # verl's, or ours
        # Trainer and engine work at the same time; in the other modes in turns, and each takes all cores.
        threads = max(1, (os.cpu_count() or 1) // 2)
    else:
        return {}
    return {"OMP_NUM_THREADS": str(threads), CHOSEN: str(threads)}


def _is_small(model: Mapping[str, Any]) -> bool:
    """Return whether a second thread would bring less than it costs; no, where the model is not on this machine yet."""
    try:
        size = json.loads(read_regular(Path(str(model.get("path"))).expanduser() / "config.json")).get("hidden_size")
    except (OSError, ValueError, AttributeError, RuntimeError):  # the start-up check reports unreadable values
        return False
    return isinstance(size, int) and size <= _SMALL
