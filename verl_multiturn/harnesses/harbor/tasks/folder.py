"""`read_folder`: a task in Harbor's form as a `Task` of the embedded sandbox, where it needs no image of its own.

    task.toml         seconds of the verifier, variables, `artifacts`: the part of the work taken to the tests;
                      `unguarded = true` below [metadata], as of the verdict `script`
    instruction.md    the text for the model
    environment/      a Dockerfile with FROM, WORKDIR /app, ENV and COPY alone, and its copied files  (definition.py)
    tests/test.sh     writes the reward
    solution/solve.sh the solution that `check.py` runs

Invariants:
- a feature that a workspace lacks is refused by name. Nothing of a folder is omitted silently;
- only plain files that lie in the folder are read, and of each part no more than `_MOST_BYTES`: no link leads to a file
  of the host;
- the tests run in a fresh workspace, whatever the folder's `environment_mode` is.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.trials.definition import Definition, NeedsImageError, read_definition
from verl_multiturn.verdicts.task import Task, read_task
from verl_multiturn.workspaces.settings import WorkspaceSettings

ROOT = PurePosixPath("/app")
"""The folder of the task's tree, in Harbor's environment and in a workspace."""
_VERIFIER_S = 600.0
"""Seconds of the verifier where the folder names none: Harbor's default."""
MOST_TESTS_S = 900.0
"""Most seconds that tests may take."""
_MOST_BYTES = 16 * 2**20
"""Most bytes of `tests`, of `solution`, and of a single file."""
_LIMITS = ("network_mode", "allowed_hosts")
_TAKEN = {
    "": ("schema_version", "version", "task", "metadata", "source", "artifacts"),
    "agent": ("timeout_sec", "user", *_LIMITS),
    "environment": ("build_timeout_sec", "docker_image", "cpus", "memory_mb", "storage_mb", "memory", "storage", "env",
                    "workdir", "allow_internet", *_LIMITS),
    "verifier": ("timeout_sec", "environment_mode", *_LIMITS),
    "solution": (),
}  # fmt: skip
"""Settings of task.toml, by section, that are read here, or unused: a workspace has limits of its own."""
_NEEDS_HARBOR = {
    "": ("steps", "multi_step_reward_strategy"),
    "agent": (),
    "environment": ("healthcheck", "mcp_servers", "skills_dir", "gpus", "gpu_types", "tpu", "os"),
    "verifier": ("collect", "environment", "env", "user"),
    "solution": ("env",),
}
"""Those that a workspace has no counterpart for."""


@dataclass(frozen=True)
class HarborFolder:
    """A task's folder, as it was read.

    Attributes:
        path: The folder.
        instruction: The text for the model.
        task: The task as the judge knows it. It has no gold repair: the solution is a script.
        solution: Files of the folder `solution`, by their path; empty where there is none.
    """

    path: Path
    instruction: str
    task: Task
    solution: Mapping[str, bytes]


def is_folder(path: Path) -> bool:
    """Return whether a path is a task's folder."""
    return (path / "task.toml").is_file()


def folders_below(path: Path) -> list[Path]:
    """Return the task folders at a path: the folder itself, or those in it, in the order of their names.

    Raises:
        ConfigError: There are none.
    """
    found = [path] if is_folder(path) else sorted(each.parent for each in path.glob("*/task.toml"))
    if not found:
        deeper = next((repr(str(each.parent.parent)) for each in sorted(path.glob("*/*/task.toml"))), "another folder")
        raise ConfigError(
            f"{str(path)!r} has no task in Harbor's form, expected folders with a task.toml in it; name {deeper}"
        )
    return found


def read_folder(path: Path, bases: Collection[str] = ()) -> HarborFolder:
    """Read a task's folder.

    Args:
        path: The folder.
        bases: Images of which this machine's programs take the place, such as `ubuntu:24.04`, beside `scratch`.

    Raises:
        ConfigError: It is not a task, cannot be read, or needs more than a workspace has.
    """
    try:
        return _read(path.resolve(), bases)
    except NeedsImageError as error:
        raise ConfigError(f"the task {str(path)!r}: {_needs_harbor(error.why)}") from None
    except ConfigError as error:
        raise ConfigError(f"the task {str(path)!r}: {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        # No file, no TOML, no UTF-8; a value of another kind than Harbor has there.
        raise ConfigError(f"the task {str(path)!r} cannot be read: {error}; mend it") from None


def for_tests(settings: WorkspaceSettings) -> WorkspaceSettings:
    """Return the settings of workspaces in which tests run, from those in which the model works."""
    return settings.model_copy(update={"longest_timeout_s": max(settings.longest_timeout_s, MOST_TESTS_S)})


def _read(path: Path, bases: Collection[str]) -> HarborFolder:
    settings = tomllib.loads(_read_file(path / "task.toml", path).decode())
    _read_file(path / "environment" / "Dockerfile", path, needed=False)
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    _check_settings(settings)
    given = environment.get("docker_image"), bases, environment.get("workdir")
    definition = read_definition(path / "environment", *given)
    if definition.workdir != str(ROOT):
        raise _needs_harbor(
            f"its commands start in {definition.workdir!r}, and the tree of a workspace is {str(ROOT)!r}"
        )
    tests = _files_of(path / "tests", path)
    if "Dockerfile" in tests or "docker-compose.yaml" in tests:
        raise _needs_harbor("its tests have an image of their own")
    if "test.sh" not in tests:
        raise ConfigError("tests/test.sh is not there, and it is what writes the reward; mend the task")
    timeout_s = float(verifier.get("timeout_sec", _VERIFIER_S))
    if timeout_s > MOST_TESTS_S:
        raise _needs_harbor(f"its tests may take {timeout_s:g} s, and here at most {MOST_TESTS_S:g}")
    raw = {
        "name": path.name,
        "folder": str(path / "environment"),
        "places": _places(path / "environment", definition),
        "allowed": _allowed(settings.get("artifacts", [])),
        "variables": definition.variables | _literal(environment.get("env", {})),
        "timeout_s": timeout_s,
        "verdict": {
            "kind": "script",
            "files": {name: data.decode() for name, data in tests.items()},
            "unguarded": settings.get("metadata", {}).get("unguarded", False),
        },
    }
    instruction = _read_file(path / "instruction.md", path).decode().strip()
    task = read_task(raw, "tests and environment")
    return HarborFolder(path, instruction, task, _files_of(path / "solution", path))


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of task.toml that a workspace has no counterpart for, and names that Harbor's form has not."""
    for section, needs in _NEEDS_HARBOR.items():
        held = settings.get(section, {}) if section else settings
        for name in held:
            path = f"{section}.{name}".removeprefix(".")
            if name in needs:
                if held[name] not in (None, 0, [], {}, "linux"):
                    raise _needs_harbor(f"its task.toml has {path!r}")
            elif name not in _TAKEN[section] and (section or name not in _TAKEN):
                known = sorted({*needs, *_TAKEN[section], *(() if section else filter(None, _TAKEN))})
                raise ConfigError(
                    f"its task.toml has {path!r}, which Harbor's form has not, expected one of {', '.join(known)}; "
                    "correct its name, or leave it out"
                )


def _places(folder: Path, definition: Definition) -> dict[str, str]:
    """Return where copied files lie in the tree."""
    places: dict[str, str] = {}
    folders = {ROOT}
    for source, target in definition.copies:
        at = PurePosixPath(os.path.normpath(target))
        is_file = (folder / source).is_file()
        if is_file and at in folders:  # as docker does
            at /= PurePosixPath(source).name
        folders |= {*at.parents} if is_file else {at, *at.parents}
        if not at.is_relative_to(ROOT):
            raise _needs_harbor(f"its Dockerfile copies {source!r} to {target!r}, which does not lie in {str(ROOT)!r}")
        if not (folder / source).exists():
            raise ConfigError(f"its Dockerfile copies {source!r}, which is not in {str(folder)!r}; mend the task")
        if source in places:
            raise _needs_harbor(f"its Dockerfile copies {source!r} twice")
        for each in [folder / source, *(folder / source).rglob("*")]:
            if each.is_symlink() or each.name == ".git" or not (each.is_file() or each.is_dir()):
                raise _needs_harbor(f"its Dockerfile copies {str(each.relative_to(folder))!r}, which is no plain file")
        places[source] = str(at.relative_to(ROOT))
    return places


def _allowed(artifacts: Any) -> list[str]:
    """Return globs for the part of the work taken to the tests: the artifacts, or without any the whole tree."""
    if not isinstance(artifacts, list):
        raise ConfigError(f"artifacts: {artifacts!r:.200}, expected a list; mend the task")
    globs = []
    for each in artifacts:
        source = each.get("source") if isinstance(each, Mapping) else each
        if isinstance(each, Mapping) and each.keys() - {"source"}:
            raise _needs_harbor(f"its artifact {source!r} has {sorted(each.keys() - {'source'})}")
        at = ROOT / str(source)
        if not at.is_relative_to(ROOT) or ".." in at.parts or set("*?") & set(str(at)):
            raise _needs_harbor(f"its artifact {source!r} does not lie below {str(ROOT)!r}")
        inside = "" if at == ROOT else f"{at.relative_to(ROOT)}"
        globs += [inside, f"{inside}/**/*"] if inside else ["**/*"]
    return globs or ["**/*"]


def _literal(variables: Any) -> dict[str, str]:
    """Return variables whose values are in the folder; those of the host are not for a model."""
    for name, value in dict(variables).items():
        if "${" in str(value):
            raise _needs_harbor(f"its environment.env takes {name!r} from the host")
    return {name: str(value) for name, value in dict(variables).items()}


def _read_file(path: Path, task: Path, needed: bool = True) -> bytes:
    """Return a plain file of a task.

    Args:
        path: The file.
        task: The task's folder, without links.
        needed: Whether it must be there; without it a file that is missing is empty.

    Raises:
        ConfigError: A link leads to it, it is not a plain file, or it is too large.
        OSError: It is not there, or cannot be read.
    """
    if not needed and not os.path.lexists(path):
        return b""
    name = path.relative_to(task).as_posix()
    if path.resolve() != path:
        raise ConfigError(f"{name!r} is a link, or lies behind one; put the file itself there")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name!r} is no plain file; leave it out")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ConfigError(f"{name!r} has {size} bytes, and {_MOST_BYTES} is the most; make it smaller")
    return path.read_bytes()


def _files_of(folder: Path, task: Path) -> dict[str, bytes]:
    """Return the files of a task's `tests` or `solution`, by their path in it; none where it is not there."""
    found: dict[str, bytes] = {}
    size = 0
    for each in [folder] if folder.is_symlink() else sorted(folder.rglob("*")):
        if each.is_dir() and not each.is_symlink():
            continue
        found[each.relative_to(folder).as_posix()] = data = _read_file(each, task)
        if (size := size + len(data)) > _MOST_BYTES:
            raise ConfigError(f"{folder.name!r} has more than {_MOST_BYTES} bytes; make it smaller")
    return found


def _needs_harbor(why: str) -> ConfigError:
    return ConfigError(f"it cannot be played in a workspace: {why}; run it behind Harbor, with `--variant harbor`")
