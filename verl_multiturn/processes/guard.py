"""Guard of a program that a worker starts (an MCP server, the SGLang of an evaluation): all of it ends with the worker.

    python *ARGUMENTS WORKER_PID[:FOLDER] COMMAND [ARGUMENT ...]

Why: a worker that is killed closes nothing. A server may hang in a call and never see that its input has ended. The
processes that it started (`npx` starts a shell that starts node; SGLang's detokenizer takes seconds until it watches
its parent) know nothing of the worker.

So the guard stays beside the program. It adopts the program's descendants that lose their parent, also those outside
its process group, and kills all of them when the worker or the program has ended. It ends as the program did. If the
guard itself is killed, the kernel kills the program; the program's descendants may then stay. A folder that is the
program's own is removed when all have ended.

The guard imports this file and `system.py` without the rest of the package, which takes long to import.
"""

import contextlib
import os
import select
import signal
import sys

from .system import adopt_orphans, end_children, end_with_parent

_START = "import sys; sys.path.append(sys.argv.pop(1)); from processes.guard import run; run()"
ARGUMENTS = ("-I", "-S", "-c", _START, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Arguments of the interpreter that is the guard; those of the guard follow."""
_LOOK_MS = 500
# The MCP client asks the group to end, and kills it two seconds later. By then nothing may remain outside the group.
_GRACE_S = 1
_folders: list[str] = []
"""The folder that ends with the program, if it has one."""


def worker_argument(worker: int, folder: str = "") -> str:
    """Return the first argument of a guard.

    Args:
        worker: Process id of the worker.
        folder: Folder that is removed when the program has ended; "" for none.
    """
    return f"{worker}:{folder}" if folder else str(worker)


def end(status: int | None = None) -> None:
    """Kill all descendants, and end this process.

    Args:
        status: Exit status of the program, with which this process ends, too; None: this process's group is killed with
            it, as where the program was killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    have_ended = end_children()
    if _folders:
        import shutil  # a slow import, for the few programs that have a folder

        shutil.rmtree(_folders[0], ignore_errors=True)
    if have_ended and status is not None:
        os._exit(status)
    os.killpg(0, signal.SIGKILL)


def reap(program: int) -> None:
    """Wait for the children that have ended; kill everything if the program is one of them.

    Args:
        program: Process id of the program.
    """
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == program:
                end(os.WEXITSTATUS(found[1]) if os.WIFEXITED(found[1]) else None)


def wait_for(worker: int) -> None:
    """Wait until the worker, this process's parent, has ended.

    PR_SET_PDEATHSIG is of no use here: it reports the end of the thread that started this process.

    Args:
        worker: Process id of the worker.
    """
    poll = select.poll()
    look_ms = None
    try:
        poll.register(os.pidfd_open(worker), select.POLLIN)
    except OSError:  # an older kernel, or a container that forbids it: look from time to time
        look_ms = _LOOK_MS
    while os.getppid() == worker and not poll.poll(look_ms):
        pass


def main(worker: int, command: list[str]) -> None:
    """Run a program until it or the worker ends; never returns.

    Args:
        worker: Process id of the worker.
        command: The program and its arguments.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()
    adopt_orphans()
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        if not end_with_parent(guard):
            os._exit(1)
        os.execvp(command[0], command)
    # These signals are for the program, which may end in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: end())
    signal.signal(signal.SIGCHLD, lambda *_: reap(program))
    reap(program)
    os.close(0)
    os.close(1)
    wait_for(worker)
    end()


def run() -> None:
    """Be the guard: the program of the process that the worker starts."""
    worker, _, folder = sys.argv[1].partition(":")
    _folders.extend([folder] if folder else [])
    main(int(worker), sys.argv[2:])
