"""The processes of a run that the benchmarks kill are found by their titles and by the logs of Ray's workers."""

import subprocess
import sys
from pathlib import Path

from benchmarks.training.quickstart_runs import processes_of

_ACTOR = """
import os, subprocess, sys
log = os.open(os.path.join(sys.argv[1], f"worker-ab-01000000-{os.getpid()}.out"), os.O_CREAT | os.O_WRONLY)
os.write(log, b":actor_name:Server\\n")
told = os.dup(1)
os.dup2(log, 1)
child = subprocess.Popen([sys.executable, "-c", "input()"])
os.write(told, f"{os.getpid()}\\n".encode())
input()
child.wait()
"""
_RUN = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], start_new_session=True)"


def test_an_actor_is_found_and_its_children_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, "-c", _ACTOR, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        actor = int(running.stdout.readline())
        found = processes_of(running, ("ray::Server",))
        other = processes_of(running, ("ray::Worker",))
        running.stdin.write(b"\n\n")
        running.stdin.close()
    assert ([process.pid for process in found], other) == ([actor], [])
    assert processes_of(running, ("ray::Server",)) == []
