"""Runs the program of an MCP server, and ends it, and all that it has started, with the worker.

A worker that is killed closes nothing. Its servers may hang in a call and never see that their input has ended, and
what they started (`npx` starts a shell that starts node) knows nothing of the worker. So this script stays beside the
server: it leads the group of them all, and kills the group when the worker or the server has ended. Where it is killed
itself, the kernel kills the server.

    python -I -S mcp_guard.py WORKER_PID COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end(*_: object) -> None:
    """Kill the group, this process included."""
    os.killpg(0, signal.SIGKILL)


def end_with(parent: int, by: signal.Signals) -> None:
    """Have the kernel send a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def main(worker: int, command: list[str]) -> None:
    """Run a command until it or the worker ends."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    signal.signal(signal.SIGUSR1, end)
    for by in (signal.SIGTERM, signal.SIGINT):  # meant for the server, which may end in its own way
        signal.signal(by, signal.SIG_IGN)
    end_with(worker, signal.SIGUSR1)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        for by in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(by, signal.SIG_DFL)
        end_with(guard, signal.SIGKILL)
        os.execvp(command[0], command)
    os.close(0)
    os.close(1)
    os.waitpid(server, 0)
    end()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
