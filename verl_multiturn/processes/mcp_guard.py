"""Guard of an MCP server: it runs the server's program, and ends it and all that it started with the worker.

    python *ARGUMENTS WORKER_PID COMMAND [ARGUMENT ...]

Why: a worker that is killed closes nothing. Its servers may hang in a call and never see that their input has ended.
The processes that a server started (`npx` starts a shell that starts node) know nothing of the worker.

So the guard stays beside the server. It adopts the server's descendants that lose their parent, also those that left
its process group, and kills all of them when the worker or the server has ended. If the guard itself is killed, the
kernel kills the server; the server's descendants may then stay.

The guard imports this file and `system.py` without the rest of the package, which takes long to import.
"""

import contextlib
import os
import select
import signal
import sys

from .system import adopt_orphans, end_children, end_with_parent

_START = "import sys; sys.path.append(sys.argv.pop(1)); from processes.mcp_guard import run; run()"
ARGUMENTS = ("-I", "-S", "-c", _START, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Arguments of the interpreter that is the guard; those of the guard follow."""
_LOOK_MS = 500
# The MCP client asks the group to end, and kills it two seconds later. By then nothing may be left outside the group.
_GRACE_S = 1


def end(*_: object) -> None:
    """Kill all descendants, and at last this process's own group with this process.

    Args:
        _: The arguments of a signal handler, which are not used.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_children()
    os.killpg(0, signal.SIGKILL)


def reap(server: int) -> None:
    """Wait for the children that have ended; kill everything if the server is one of them.

    Args:
        server: Process id of the server.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            if ended == server:
                end()


def wait_for(worker: int) -> None:
    """Wait until the worker, this process's parent, has ended.

    PR_SET_PDEATHSIG is of no use here: it tells of the end of the thread that started this process.

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
    """Run a server until it or the worker ends; never returns.

    Args:
        worker: Process id of the worker.
        command: The server's program and its arguments.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()
    adopt_orphans()
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        if not end_with_parent(guard):
            os._exit(1)
        os.execvp(command[0], command)
    # These signals are for the server, which may end in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
    signal.signal(signal.SIGALRM, end)
    signal.signal(signal.SIGCHLD, lambda *_: reap(server))
    reap(server)
    os.close(0)
    os.close(1)
    wait_for(worker)
    end()


def run() -> None:
    """Be the guard: the program of the process that the worker starts."""
    main(int(sys.argv[1]), sys.argv[2:])
