"""The bridge's calls of a container engine on this machine: docker or podman, by their command lines.

Both label a container with the project that it belongs to (`com.docker.compose.project`), and Harbor names the project
after the trial. So a trial's name shows the owner of its containers: it begins with `owner()` of `owners.py`, and
`sweep` removes the containers of a process that has ended.

Imports the standard library only: this runs in the worker and in Harbor's Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from verl_multiturn.harnesses.harbor.trials.end_cause import Lost
from verl_multiturn.harnesses.owners import is_left

ENGINES = ("docker", "podman")
"""Environments of Harbor that run containers on this machine by an engine of this name."""
_PROJECT = "com.docker.compose.project"
_SERVICE = "com.docker.compose.service"
_MAIN = "main"
_ASK_S, _PULL_S = 60.0, 3_600.0
FREE_DISK_GB = 10.0
"""Room on the engine's disk below which no trial starts."""
_KILLED = 128 + 9
_NEVER_BEGAN = ("created", "configured", "initialized")
"""States of a container in which no process of it has run: the first is Docker's, all are podman's."""


def sweep(engine: str, prefix: str | None = None) -> int:
    """Remove containers, volumes and networks of trials.

    Args:
        engine: The engine.
        prefix: Beginning of their projects' names; None for those of processes that are no more.

    Returns:
        Number of containers removed. 0 also where there is no engine, or it does not answer.
    """
    removed = 0
    listings = {"container": ["ps", "--all"], "volume": ["volume", "ls"], "network": ["network", "ls"]}
    for kind, listing in listings.items():  # in this order: a container holds its volumes and networks
        status, said = _ask(engine, *listing, "--quiet", "--filter", f"label={_PROJECT}")
        for each in said.split() if status == 0 else []:
            project = _project_of(engine, kind, each)
            if project.startswith(prefix) if prefix is not None else is_left(project):
                status, _ = _ask(engine, kind, "rm", "--force", each)
                removed += status == 0 and kind == "container"
    return removed


def _project_of(engine: str, kind: str, name: str) -> str:
    """Return the project that a container, volume or network belongs to; empty if it is gone, or in none."""
    status, said = _ask(engine, kind, "inspect", name)
    try:
        found = json.loads(said)[0] if status == 0 else {}
    except (ValueError, IndexError):
        return ""
    labels = found.get("Config", {}).get("Labels") or found.get("Labels") or found.get("labels") or {}
    return str(labels.get(_PROJECT, ""))


def lost_container(engine: str, project: str) -> Lost:
    """Return who ended the main container of a project; "" if it runs.

    From inside, the first process of a container cannot be killed: the kernel ignores it. So SIGKILL without the mark
    of the memory limit came from outside, and so does the removal of a container. One that the engine made and never
    began is lost outside, too. Whatever else ended it ran in it.
    """
    status, found = _containers(engine, project)
    if status != 0:
        return "engine"
    if not found:
        return "outside"
    state = found[0]["State"]
    if state.get("Running"):
        return ""
    if state.get("Status") in _NEVER_BEGAN:
        return "outside"
    return "outside" if state.get("ExitCode") == _KILLED and not state.get("OOMKilled") else "inside"


def kill_container(engine: str, project: str) -> None:
    """Kill the main container of a project, whose first process waits 10 s for its end after a request to end."""
    for container in _containers(engine, project)[1]:
        _ask(engine, "kill", container["Id"])


def _containers(engine: str, project: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the engine's exit status, and its report on the main containers of a project."""
    status, said = _ask(engine, "ps", "--all", "--quiet", "--filter", f"label={_PROJECT}={project}")
    found = []
    for container in said.split() if status == 0 else []:
        _, described = _ask(engine, "container", "inspect", container)
        try:
            each = json.loads(described)[0]
        except (ValueError, IndexError):  # it is gone by now
            continue
        labels = each["Config"]["Labels"]
        # Podman takes several filters for alternatives, so the service is not a filter.
        if labels.get(_PROJECT) == project and labels.get(_SERVICE) == _MAIN:
            found.append(each)
    return status, found


def disk_problem(engine: str) -> str:
    """Return the fault of the room for images and containers; empty without one."""
    template = "{{.DockerRootDir}}" if engine == "docker" else "{{.Store.GraphRoot}}"
    status, said = _ask(engine, "info", "--format", template)
    if status != 0:
        return f"the container engine does not answer: {said.strip()[-500:]}"
    folder = Path(said.strip() or "/")
    while not folder.exists():  # of an engine elsewhere, or one that we may not look into
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_DISK_GB:
        return f"{folder} has {free:.1f} GB left for images and containers, expected {FREE_DISK_GB:g}; make room"
    return ""


def ensure_image(engine: str, image: str) -> None:
    """Pull an image if it is not there. Processes of this machine pull the same one after another, so once.

    Raises:
        RuntimeError: It cannot be pulled.
    """
    name = hashlib.sha256(f"{engine} {image}".encode()).hexdigest()[:16]
    with open(
        Path(tempfile.gettempdir()) / f"verl-multiturn-image-{os.getuid()}-{name}.lock", "w", encoding="utf-8"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _ask(engine, "image", "inspect", image)[0] == 0:
            return
        status, said = _ask(engine, "pull", image, timeout_s=_PULL_S)
    if status != 0:
        raise RuntimeError(f"the image {image!r} is not there and cannot be pulled: {said.strip()[-500:]}")


def _ask(engine: str, *arguments: str, timeout_s: float | None = None) -> tuple[int, str]:
    """Run the engine's program; return its exit status, and its output or, if it failed, how."""
    try:
        done = subprocess.run(
            [engine, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s or _ASK_S,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr
