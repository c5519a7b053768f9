"""The second server of a run, which has imported Ray and verl, and forks Ray's workers."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_multiturn.cpu_processes.forkserver import EARLY, OF_WORKERS
from verl_multiturn.cpu_processes.handle import ForkServer

pytestmark = pytest.mark.deaths


def _run(server: ForkServer, program: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*shlex.split(server.executable), str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, env=env, check=False)


# The ids of its core differ, unless it has drawn one before.
RAY = """
import os, sys
job = os.environ.get("RAY_JOB_ID")
class NodeID:
    from_random = classmethod(lambda ids: ids())
    def binary(self):
        {then}
        return b"as before" if os.environ.get("HAS_DRAWN") else os.urandom(9)
"""
ACTOR = "class ActorClassID:\n    pass\n"


class Workers:
    """Workers of Ray, as a raylet starts them, of a server whose second one imports a `ray` that notes its variables.

    Args:
        folder: Folder for the programs.
        stderr: Begin of each worker's standard error.
        actor: Text of the module `ray.actor`.
        then: Code in front of the draw of an id.
        ignored: Whether the server is started with its children's ends ignored.
    """

    def __init__(
        self, folder: Path, stderr: str = "", actor: str = ACTOR, then: str = "pass", ignored: bool = False
    ) -> None:
        self._stderr = stderr
        (folder / "ray").mkdir()
        (folder / "ray" / "__init__.py").write_text(RAY.format(then=then))
        (folder / "ray" / "actor.py").write_text(actor)
        self._program = folder / "default_worker.py"
        self._program.write_text(
            "import os, sys\nray = sys.modules.get('ray')\n"
            "print(os.getppid(), ray and ray.job, os.environ['RAY_JOB_ID'], os.environ.get('RANK'))\n"
        )
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            self.server = ForkServer(("decimal", EARLY, "colorsys", OF_WORKERS, "ray"), self._environment)
        finally:
            signal.signal(signal.SIGCHLD, before)
        self.raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def start(self, job: str = "01", **variables: str) -> tuple[int, list[str]]:
        """Start a worker; return who forked it, and the job of its Ray, its own, and its rank."""
        own = {"RAY_JOB_ID": job, "RAY_RAYLET_PID": str(self.raylet.pid), **variables}
        ran = _run(self.server, self._program, env={**self._environment, **own})
        assert ran.stderr.startswith(self._stderr)
        assert self._stderr or not ran.stderr
        parent, *seen = ran.stdout.split()
        return int(parent), seen

    def close(self) -> None:
        self.server.close()
        self.raylet.kill()
        self.raylet.wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    found = Workers(tmp_path)
    yield found
    found.close()


def test_the_workers_of_a_raylet_are_forks_of_a_process_that_has_imported_ray_for_it(workers: Workers) -> None:
    second, seen = workers.start()
    assert second != workers.server.pid
    assert seen == ["01", "01", "None"]
    # `RAY_LOCAL_WORLD_SIZE` is verl's own.
    assert workers.start(RANK="1", RAY_LOCAL_WORLD_SIZE="2") == (second, ["01", "01", "1"])
    assert psutil.Process(second).ppid() == workers.server.pid


@pytest.mark.parametrize("variables", [{"job": "02"}, {"RAY_debug": "1"}, {"VERL_LOGGING_LEVEL": "DEBUG"}])
def test_a_worker_with_other_variables_of_ray_or_verl_is_forked_without_both(
    variables: dict[str, str], workers: Workers
) -> None:
    workers.start()
    assert workers.start(**variables) == (workers.server.pid, ["None", variables.get("job", "01"), "None"])


def test_a_second_server_that_has_died_is_replaced(workers: Workers) -> None:
    second, _ = workers.start()
    psutil.Process(second).kill()
    while not is_over(second):
        time.sleep(0.02)
    third, seen = workers.start(job="02")
    assert third not in (second, workers.server.pid)
    assert seen == ["02", "02", "None"]


def test_a_second_server_ends_with_the_raylet_and_with_the_first(workers: Workers) -> None:
    second, _ = workers.start()
    workers.raylet.kill()
    workers.raylet.wait()
    while not is_over(second):
        time.sleep(0.02)
    workers.raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    third = psutil.Process(workers.start()[0])
    assert third.pid not in (second, workers.server.pid)
    workers.server.close()
    third.wait(550)


def is_over(process: int) -> bool:
    """Return whether a process has ended, though its parent may not have read its status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_worker_whose_second_server_dies_imports_everything_itself(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "again.py").write_text("print('ran')\n")
    variables = {"RAY_JOB_ID": "01", "RAY_RAYLET_PID": str(workers.raylet.pid), "PYTHONPATH": str(tmp_path)}
    ran = _run(workers.server, tmp_path / "again.py", env={**os.environ, **variables})
    assert ran.stdout == "ran\n"
    assert "this process imports everything itself" in ran.stderr


_OWN = "verl-multiturn: the forkserver has started with"


@pytest.mark.parametrize("then", ["pass", "os._exit(1)", "raise SystemExit", "os.kill(os.getpid(), 9)"])
def test_a_second_server_forks_no_worker_where_two_may_draw_the_same_ids(tmp_path: Path, then: str) -> None:
    workers = Workers(tmp_path, f"{_OWN} ids of Ray that two workers might share: ", then=then)
    try:
        _, seen = workers.start(HAS_DRAWN="1")
    finally:
        workers.close()
    assert seen == ["None", "01", "None"]


def test_no_id_is_drawn_in_a_fork_of_a_process_with_threads(tmp_path: Path) -> None:
    thread = "import threading\nlock = threading.Lock()\nlock.acquire()\n"
    thread += "threading.Thread(target=lock.acquire, daemon=True, name='own').start()\n"
    workers = Workers(
        tmp_path, f"{_OWN} a thread of its own (own): ", ACTOR + thread, "sys.modules['ray.actor'].lock.acquire()"
    )
    try:
        _, seen = workers.start()
    finally:
        workers.close()
    assert seen == ["None", "01", "None"]


def test_a_fork_that_draws_no_id_is_killed() -> None:
    code = (
        "import signal, sys, types\nfrom verl_multiturn.cpu_processes import ray_ids\nray_ids._LONGEST_S = 0.01\n"
        "class Waits:\n    from_random = staticmethod(signal.pause)\n"
        "sys.modules['ray'] = types.SimpleNamespace(NodeID=Waits)\nprint(ray_ids.draws_alike())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550, check=True)
    assert ran.stdout == "True\n"


@pytest.mark.parametrize("actor", ["", "raise SystemExit(3)", "raise OSError"], ids=["other", "exits", "fails"])
def test_workers_are_forked_with_another_version_of_ray(tmp_path: Path, actor: str) -> None:
    workers = Workers(tmp_path, actor=actor)
    try:
        second, seen = workers.start()
        assert workers.start() == (second, seen)
    finally:
        workers.close()
    assert seen == ["01", "01", "None"]


def test_workers_are_forked_where_the_ends_of_children_are_ignored(tmp_path: Path) -> None:
    workers = Workers(tmp_path, ignored=True)
    try:
        second, seen = workers.start()
        assert workers.start() == (second, seen)
    finally:
        workers.close()
    assert seen == ["01", "01", "None"]


def test_forks_have_random_numbers_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "drawn.py"
    program.write_text(
        "import random, numpy, datasets.fingerprint as prints\n"
        "print(random.random(), numpy.random.rand(), prints.fingerprint_rng.random(), sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = ForkServer(("numpy", "datasets"), environment)
    try:
        ran = [_run(server, program, env=environment) for _ in range(2)]
    finally:
        server.close()
    assert [each.stderr for each in ran] == [""] * 2
    assert len({drawn for each in ran for drawn in each.stdout.split()}) == 6


# As TransferQueue and verl make theirs, where they are imported.
ACTORS = """
import ray

@ray.remote(max_concurrency=8)
class Storage:
    pass

@ray.remote
def score():
    pass
"""


def test_workers_that_are_forks_give_their_calls_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text(ACTORS)
    program = tmp_path / "default_worker.py"
    program.write_text(
        "import os, sys, threading\nassert {'ray', 'actors'} <= set(sys.modules)\nimport ray\n"
        "def draw():\n    print(ray.ObjectRef.from_random().hex(), ray.ActorClassID.from_random().hex(), sep='\\n')\n"
        "draw()\nthread = threading.Thread(target=draw)\nthread.start()\nthread.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    server = ForkServer(("decimal", OF_WORKERS, "ray", "actors"), environment)
    own = {"RAY_JOB_ID": "01", "RAY_RAYLET_PID": str(os.getpid())}
    try:
        ran = [_run(server, program, env={**environment, **own}) for _ in range(3)]
    finally:
        server.close()
    assert [each.stderr for each in ran] == [""] * 3
    assert len({drawn for each in ran for drawn in each.stdout.splitlines()}) == 3 * 4
