"""The program that Ray starts for each worker in place of its own, which would first import Ray to read an environment.

    raylet ─starts→ setup_worker.py FILE [ARGUMENT …] --language=PYTHON --serialized-runtime-env-context=JSON

Ray's program sets the variables of the worker's environment, and goes on as the executable that the environment names.
This one does the same for a worker that `fork_worker.py` gets from the forkserver, and hands all others over to Ray's.

It imports only the standard library, and little of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys

import fork_worker

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main() -> None:
    """Become the worker."""
    arguments = sys.argv[1:]
    context = _value_of(_CONTEXT, arguments)
    command = fork_of(json.loads(context)) if context and _value_of(_LANGUAGE, arguments) == "PYTHON" else None
    if command is None:
        theirs = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, theirs, *arguments])
    set_variables(json.loads(context)["env_vars"])
    sys.argv = [*command, *(word for word in arguments if not word.startswith((_CONTEXT, _LANGUAGE)))]
    fork_worker.main()


def _value_of(option: str, arguments: list[str]) -> str:
    return next((word.removeprefix(option) for word in arguments if word.startswith(option)), "")


def fork_of(context: dict[str, object]) -> list[str] | None:
    """Return the path of `fork_worker.py` and its first argument, which a worker's environment names; None: another.

    Args:
        context: Ray's runtime environment of the worker.
    """
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        return None
    _, *command = shlex.split(str(context.get("py_executable"))) or [""]
    ours = os.path.realpath(fork_worker.__file__)
    is_ours = len(command) == 4 and command[:2] == ["-I", "-S"] and os.path.realpath(command[2]) == ours
    return command[2:] if is_ours else None


def set_variables(variables: dict[str, str]) -> None:
    """Set environment variables, in whose values `${NAME}` stands for another one's, and for nothing if it is unset."""
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


if __name__ == "__main__":
    fork_worker.default_interrupt()
    main()
