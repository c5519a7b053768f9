"""What Ray starts in the place of Python: asks `forkserver.py` for a worker, and stands for it until it ends.

    python -I -S fork_worker.py SOCKET PROGRAM [ARGUMENT …]

Imports the standard library only, and little of it.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Run a program in a fork, and end as it does."""
    address, *arguments = sys.argv[1:]
    with open("/proc/self/oom_score_adj") as score:
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": score.read(),
        }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    except OSError as error:
        print(f"verl-multiturn: no forkserver ({error}): this worker imports everything itself", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    status = int(server.recv(64) or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
