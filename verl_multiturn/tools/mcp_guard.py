"""Runs the program of an MCP server, and ends it, and all that it has started, with the worker.

A worker that is killed closes nothing. Its servers may hang in a call and never see that their input has ended, and
what they started (`npx` starts a shell that starts node) knows nothing of the worker. So this script stays beside the
server: it adopts what loses its parent, also what has left its group, and kills all of it when the worker or the server
has ended. Where it is killed itself, the kernel kills the server, and nobody what the server has started elsewhere.

    python -I -S mcp_guard.py WORKER_PID COMMAND [ARGUMENT ...]
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
# The client kills the group two seconds after it has told it to end; by then nothing may be left outside the group.
_GRACE_S = 1
_ROUNDS = 100


def children() -> list[int]:
    """Return the processes whose parent this one is."""
    found, here = [], os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == here:
                found.append(int(name))
    return found


def end(*_: object) -> None:
    """Kill all descendants: the children of each that ends become this one's. At last the group, with this process."""
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
    """Take note of the children that have ended; of the server's end, too."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            if ended == server:
                end()


def wait_for(worker: int) -> None:
    """Wait for the end of a process, this one's parent.

    Not of the thread that started this one, which is what PR_SET_PDEATHSIG would tell of.
    """
    poll = select.poll()
    look_ms = None
    try:
        poll.register(os.pidfd_open(worker), select.POLLIN)
    except OSError:  # an older kernel, or a container that does not let
        look_ms = _LOOK_MS
    while os.getppid() == worker and not poll.poll(look_ms):
        pass


def main(worker: int, command: list[str]) -> None:
    """Run a command until it or the worker ends."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it has ended before that
            os._exit(1)
        os.execvp(command[0], command)
    # Meant for the server, which may end in its own way.
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
