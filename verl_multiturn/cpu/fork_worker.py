"""The program that is started in place of Python: it asks `forkserver.py` for a process, and ends with that.

    python -I -S fork_worker.py SOCKET PROGRAM [ARGUMENT …]      started by Ray
    python -I -S fork_worker.py SOCKET -c CODE [ARGUMENT …]      started by `multiprocessing`

It imports only the standard library, and little of it.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run a program in a fork, and end with its exit status.

    Where no fork can be had, start Python with the program in this process instead.
    """
    address, *arguments = sys.argv[1:]
    spawner, inherited = None, []
    started = arguments
    if arguments[0].startswith("-"):
        # Before the code are the options of warnings, which the server has from its environment, too.
        started = arguments[arguments.index("-c") :]
        if "spawn_main(" not in started[1]:  # `multiprocessing` has helpers of its own
            os.execv(sys.executable, [sys.executable, *arguments])
        spawner, inherited = os.getppid(), inheritable()
        end_with(spawner)
    with open("/proc/self/oom_score_adj", encoding="utf-8") as score:
        request = {
            "address": address,
            "arguments": started,
            "spawner": spawner,
            "inherited": inherited,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": score.read(),
            "blocked_signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *inherited])
        verdict, _, said = server.recv(4096).decode().partition(" ")
    except OSError as error:
        verdict, said = "", str(error)
    if verdict != "forked":
        reason = (
            f"the forkserver has started {said}" if verdict == "refused" else f"no forkserver ({said or 'it is busy'})"
        )
        print(f"verl-multiturn: {reason}: this worker imports everything itself", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    for descriptor in inherited:
        os.close(descriptor)
    end(wait(server, int(said)))


def inheritable() -> list[int]:
    """Return the descriptors, beyond the standard ones, that a program started here would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def end_with(parent: int) -> None:
    """End when the process ends that started this one, as SGLang's processes do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def wait(server: socket.socket, pid: int) -> int:
    """Wait for a fork to end, and return its exit status; 1 when the server has ended and the status is unknown.

    Args:
        server: The connection to the server, which sends `ended STATUS`.
        pid: Process id of the fork.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = -1
    try:
        _, _, status = server.recv(64).decode().partition(" ")
    except OSError:
        status = ""
    if not status and process != -1:
        select.select([process], [], [])
    return int(status or 1)


def end(status: int) -> None:
    """End this process with an exit status; a negative status stands for the signal that ended the fork."""
    if status < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
