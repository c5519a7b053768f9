"""Guard of an MCP server: a script that runs the server's program, and ends it and all that it started with the worker.

    python -I -S mcp_guard.py WORKER_PID COMMAND [ARGUMENT ...]

Why: a worker that is killed closes nothing. Its servers may hang in a call and never see that their input has ended.
The processes that a server started (`npx` starts a shell that starts node) know nothing of the worker.

So the guard stays beside the server. It adopts the server's descendants that lose their parent, also those that left
its process group, and kills all of them when the worker or the server has ended. If the guard itself is killed, the
kernel kills the server; the server's descendants may then stay.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_MS = 500
# The MCP client asks the group to end, and kills it two seconds later. By then nothing may be left outside the group.
_GRACE_S = 1
_ROUNDS = 100


def children() -> list[int]:
    """Return the ids of this process's children."""
    found, here = [], os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == here:
                found.append(int(name))
    return found


def end(*_: object) -> None:
    """Kill all descendants, and at last this process's own group with this process.

    When a child ends, its children become children of this process, so the rounds reach every generation.

    Args:
        _: The arguments of a signal handler, which are not used.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for _round in range(_ROUNDS):
        if not (left := children()):
            break
        for child in left:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
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
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # the guard ended before the line above
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
