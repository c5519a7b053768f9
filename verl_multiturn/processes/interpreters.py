"""Another Python interpreter, for code that cannot be imported by this one.

Whether a program is one, and the environment variables of its processes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from verl_multiturn.errors import ConfigError

OLDEST = (3, 11)
"""The oldest version of Python that can run programs of this package."""
_NAMED = ".".join(map(str, OLDEST))
_ABOUT = "import sys; print('python', sys.implementation.name, *sys.version_info[:2])"
_ABOUT_S = 60.0


def interpreter_environment(python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for another interpreter, as the activation of its virtual environment sets them.

    Args:
        python: The interpreter: a path, or a name that is looked for on the PATH.
        environment: The variables of this process.
    """
    kept = {name: value for name, value in environment.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    folder = os.path.dirname(os.path.abspath(shutil.which(python) or python))
    return kept | {"PATH": os.pathsep.join(filter(None, (folder, environment.get("PATH"))))}


def check_python(python: str, where: str) -> None:
    """Check that a program is a Python interpreter that can run programs of this package.

    Args:
        python: The program: a path, or a name that is looked for on the PATH.
        where: The setting that errors name.

    Raises:
        ConfigError: It is not.
    """
    if shutil.which(python) is None:
        raise ConfigError(
            f"{where}: {python!r} is no program that can be started; give the path of a Python {_NAMED} or later that "
            "every node has, such as '/path/to/venv/bin/python' (`verl-multiturn install` makes those of harnesses)"
        )
    try:
        done = subprocess.run(
            [python, "-c", _ABOUT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ABOUT_S,
            check=False,
            env=interpreter_environment(python, os.environ),
        )
        answer, problem = done.stdout, done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, problem = b"", str(error)
    found = re.fullmatch(r"python (\w+) (\d+) (\d+)", answer.decode(errors="replace").strip())
    if found is None:
        raise ConfigError(
            f"{where}: {python!r} is no Python that works ({problem[-500:]}); give the path of one, {_NAMED} or later"
        )
    if found[1] != "cpython" or (int(found[2]), int(found[3])) < OLDEST:
        raise ConfigError(
            f"{where}: {python!r} is {found[1]} {found[2]}.{found[3]}, expected CPython {_NAMED} or later; make the "
            "agent's environment with one"
        )
