"""Run a program as Python's command line does, in a process that is a Python already (see `warm_python`).

as_python.py FILE | -m MODULE | -c PROGRAM [ARGUMENT …]
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the program with the arguments, the path and the name that a new Python would give it."""
    _open_streams()
    words = sys.argv[1:]
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _open_streams() -> None:
    """Make Python's streams anew: those of the process that was forked are of another kind of file."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    output = open(1, "w", closefd=False)  # noqa: SIM115
    output.reconfigure(line_buffering=output.isatty(), write_through=unbuffered)
    sys.stdout = output
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
