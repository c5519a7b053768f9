"""Refusals about traces: a backend that is not installed, which verl would import when Ray runs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import TRACE_BACKENDS
from verl_multiturn.verl_bridge.startup.own_code import has_other_environment
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_BACKEND = "actor_rollout_ref.rollout.trace.backend"
_LOGGER = "trainer.logger"
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")


def check_backend(run: RunView) -> None:
    """Refuse a name that verl does not know: it would silently trace nothing."""
    if (backend := run.value(_BACKEND)) is not None and backend not in TRACE_BACKENDS:
        hint = did_you_mean(str(backend), TRACE_BACKENDS)
        raise ConfigError(f"{_BACKEND}={backend!r}: expected one of {list(TRACE_BACKENDS)}{hint and '; ' + hint}")


def _needed(backend: str) -> list[str]:
    """Return the packages of a backend, which have the names of their modules."""
    if backend != "mlflow":
        return [backend]
    # verl's own default; the package mlflow-skinny leaves the database to others.
    address = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db")
    return ["mlflow", "sqlalchemy", "alembic"] if address.startswith(_DATABASES) else ["mlflow"]


def _missing(run: RunView) -> str | None:
    """Return the packages that the backend lacks; None where the workers' environment is another one than this."""
    backend = run.value(_BACKEND)
    if backend not in TRACE_BACKENDS or has_other_environment(run.config):
        return None
    return " ".join(name for name in _needed(backend) if find_spec(name) is None)


def _loggers(run: RunView) -> list[Any]:
    given = run.value(_LOGGER) or []
    return [given] if isinstance(given, str) else list(given)


def _lacks_rl_insight(run: RunView) -> bool:
    there = has_other_environment(run.config) or find_spec("rl_insight") is not None
    return "rl_insight" in _loggers(run) and not there


def _writes_none(run: RunView) -> bool:
    return run.value(_BACKEND) is not None and (run.our_trainer is None or run.own_manager is not None)


TRACES: list[Check] = [
    check_backend,
    RefusalRow(
        _BACKEND,
        when=_missing,
        why="it needs packages that are not installed",
        remedy="pip install {found}, or leave it out",
    ),
    RefusalRow(
        _LOGGER,
        when=_lacks_rl_insight,
        why="rl_insight needs a package that is not installed",
        remedy="pip install rl-insight, or leave it out",
    ),
    RefusalRow(
        _BACKEND,
        when=_writes_none,
        why="it has no effect, since the workers of our agent-loop manager write the traces, and this run has another "
        "trainer or manager",
        remedy="use one of verl's own V1 trainers and set no agent_loop_manager_class, or leave it out",
        is_refusal=False,
    ),
]
