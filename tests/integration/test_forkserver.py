"""The process that a CPU run's workers are forked from. Its forks have to be as good as a new Python."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.support import spawned_child
from tests.support.warm_python import run_warm
from verl_multiturn.cpu.engine_processes import ForkedProcess
from verl_multiturn.cpu_processes import handle as module
from verl_multiturn.cpu_processes.engine_child import register_models
from verl_multiturn.cpu_processes.forkserver import ADDRESS, READ_AT_IMPORT
from verl_multiturn.cpu_processes.handle import ForkServer, forkserver

pytestmark = [pytest.mark.stack, pytest.mark.deaths]


def environment_of_imports() -> dict[str, str]:
    """Return the variables of this process that must equal the server's, since they are read at import."""
    return {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["decimal", "numpy", "there_is_no_such_module"])
    yield server
    server.close()


def run(server: ForkServer, program: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shlex.split(server.executable), str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=550,
        **options,
    )


def test_a_fork_is_as_a_new_python(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, os, signal, sys, of_this_worker\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 10_000\n"
        "assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []) and not sys.flags.safe_path\n"
        "print('decimal' in sys.modules, 'ray' in sys.modules, 'verl' in sys.modules, __name__)\n"
        "print(sys.argv[1:], sys.orig_argv[1:], os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0))\n"
        "print(sorted(os.environ.items()))\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "of_this_worker.py").write_text("")
    environment = {**environment_of_imports(), "GREETING": "grüß dich", "LC_ALL": "C.UTF-8"}
    environment["PYTHONPATH"] = str(tmp_path / "lib")

    def prepare() -> None:
        os.nice(5)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    options = {"input": "said", "env": environment, "cwd": tmp_path, "preexec_fn": prepare}
    ran = run(server, program, "a b", "", **options)
    assert ran.stdout.splitlines() == [
        "True False False __main__",
        f"{['a b', '']} {[str(program), 'a b', '']} {tmp_path} {min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)}",
        str(sorted({**environment, ADDRESS: shlex.split(server.executable)[-1]}.items())),
    ]
    assert ran.stderr == "said\n"
    assert ran.returncode == 7


def set_up(context: dict[str, object], worker: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a worker as Ray's raylet does, where it knows our program."""
    given = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON"]
    return subprocess.run(
        [sys.executable, str(module.SETUP_WORKER), str(worker), *arguments, *given],
        capture_output=True,
        text=True,
        timeout=550,
        env=environment_of_imports() | {"HOME": "/home/of/ray", "KEPT": "old"},
    )


def test_rays_worker_is_a_fork_with_the_variables_of_its_environment(server: ForkServer, tmp_path: Path) -> None:
    worker = tmp_path / "default_worker.py"
    worker.write_text(
        "import os, sys\n"
        "print('decimal' in sys.modules, sys.argv[1:])\n"
        "print(*(os.environ.get(name) for name in ('KEPT', 'NEW', 'OTHER')), sep='|')\n"
        "sys.exit(7)\n"
    )
    variables = {"NEW": "a ${HOME} ${UNSET_BEFORE} b", "KEPT": "new:${KEPT}", "OTHER": "$unset"}
    context: dict[str, object] = {"command_prefix": [], "env_vars": variables, "py_executable": server.executable}
    ran = set_up(context, worker, "--node-ip=1", "--runtime-env-hash=2")
    assert ran.stdout.splitlines() == [
        "True ['--node-ip=1', '--runtime-env-hash=2']",
        "new:old|a /home/of/ray  b|$unset",
    ]
    assert (ran.stderr, ran.returncode) == ("", 7)
    assert variables_of_ray(variables) == {"NEW": "a /home/of/ray  b", "KEPT": "new:old", "OTHER": "$unset"}


def variables_of_ray(variables: dict[str, str]) -> dict[str, str]:
    """Return the settings of Ray's own program."""
    from ray._private.utils import update_envs

    with mock.patch.dict(os.environ, {"HOME": "/home/of/ray", "KEPT": "old"}, clear=True):
        update_envs(variables)
        return {name: os.environ[name] for name in variables}


@pytest.mark.parametrize(
    "other",
    [
        {"command_prefix": ["nice"]},
        {"override_worker_entrypoint": "/elsewhere.py"},
        {"py_executable": "python -I -S fork_worker.py"},
        {"py_executable": "nice {ours}"},
        {"py_executable": None},
    ],
)
def test_any_other_worker_is_set_up_by_rays_own_program(
    server: ForkServer, tmp_path: Path, other: dict[str, object]
) -> None:
    worker, theirs, ours = tmp_path / "default_worker.py", tmp_path / "setup_worker.py", server.executable
    theirs.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    other = {key: value.format(ours=ours) if isinstance(value, str) else value for key, value in other.items()}
    context = {"command_prefix": [], "env_vars": {}, "py_executable": ours, **other}
    ran = set_up(context, worker, "--node-ip=1")
    assert json.loads(ran.stdout)[:2] == [str(worker), "--node-ip=1"], ran.stderr


def test_every_module_of_a_package_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "several"
    package.mkdir()
    for name, text in {"__init__": "", "one": "", "broken": "raise SystemExit(3)", "two": ""}.items():
        (package / f"{name}.py").write_text(text)
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sorted(name for name in sys.modules if name.startswith('several')))\n")
    server = ForkServer(["several.*", "no_such_package.*"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        ran = run(server, program, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    finally:
        server.close()
    assert ran.stdout == "['several', 'several.one', 'several.two']\n", ran.stderr


def test_a_registry_of_models_gets_the_package_of_the_forks_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = mock.Mock()
    monkeypatch.setitem(sys.modules, "sglang.srt.models.registry", registry)
    register_models("theirs.models")
    registry.ModelRegistry.register.assert_called_once_with("theirs.models", overwrite=True)
    register_models(None)
    assert registry.ModelRegistry.register.call_count == 1


def test_a_fork_has_a_process_group_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    """Ray kills the process group of a worker that has died."""
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.getpgid(0) == os.getpid(), os.getsid(0))\n")
    assert run(server, program).stdout == f"True {os.getsid(0)}\n"


def test_forks_draw_different_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import random, numpy\nprint(random.random(), numpy.random.random(), sep='\\n')\n")
    numbers = [number for _ in range(3) for number in run(server, program).stdout.splitlines()]
    assert len(set(numbers)) == 6


def test_each_fork_has_a_process_group_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    """When a worker dies, Ray ends its whole process group."""
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.getpid() == os.getpgid(0))\n")
    assert run(server, program).stdout == "True\n"


def test_a_traceback_and_a_signal_reach_who_started_it(server: ForkServer, tmp_path: Path) -> None:
    broken, killed = tmp_path / "broken.py", tmp_path / "killed.py"
    broken.write_text("raise ValueError('no such thing')\n")
    killed.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ran = run(server, broken)
    assert ran.returncode == 1
    assert "ValueError: no such thing" in ran.stderr
    assert run(server, killed).returncode == -signal.SIGKILL


def test_a_fork_ends_with_who_started_it(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    client = subprocess.Popen([*shlex.split(server.executable), str(program)], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    fork = psutil.Process(int(client.stdout.readline()))
    assert fork.pid != client.pid
    client.kill()
    client.communicate(timeout=550)
    fork.wait(550)


def spawned(server: ForkServer, monkeypatch: pytest.MonkeyPatch, target: Any, *given: Any) -> tuple[Any, Any]:
    """Start a process as SGLang's engine does in a fork of the server; return it, and its messages."""
    monkeypatch.setenv(ADDRESS, shlex.split(server.executable)[-1])
    here, there = multiprocessing.Pipe(duplex=False)
    process = ForkedProcess(target=target, args=(there, *given))
    process.start()
    there.close()  # so that a child that fails before it sends ends the wait
    return process, here.recv()


def test_a_process_that_multiprocessing_spawns_is_a_fork_that_knows_its_parent(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, (pid, parent, has_imported) = spawned(server, monkeypatch, spawned_child.tell, 5)
    process.join(550)
    assert (parent, has_imported, process.exitcode) == (os.getpid(), True, 5)
    assert pid != process.pid
    assert multiprocessing.spawn.get_executable() in (sys.executable, os.fsencode(sys.executable))


def test_a_fork_can_have_a_title(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from setproctitle import setproctitle\nsetproctitle('sglang::scheduler')\n"
        "print(open('/proc/self/cmdline').read().rstrip('\\0'))\n"
    )
    assert run(server, program).stdout.strip() == "sglang::scheduler"


def test_a_spawned_fork_ends_with_its_client(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    process, pid = spawned(server, monkeypatch, spawned_child.stay)
    fork = psutil.Process(pid)
    process.kill()
    process.join(550)
    assert process.exitcode == -signal.SIGKILL
    fork.wait(550)


def test_a_spawned_process_is_a_new_python_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer([])
    server.close()
    process, (pid, parent, _) = spawned(server, monkeypatch, spawned_child.tell, 5)
    process.join(550)
    assert (pid, parent, process.exitcode) == (process.pid, os.getpid(), 5)


def test_what_cannot_be_run_is_not_there_to_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPAWNED", "#!/no/such/interpreter\n")  # as on a file system mounted with noexec
    server = ForkServer([])
    process, (pid, _, _) = spawned(server, monkeypatch, spawned_child.tell, 5)
    process.join(550)
    server.close()
    assert (pid, process.exitcode) == (process.pid, 5)


def test_a_server_refuses_a_descriptor_that_it_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fork would have it closed, or lose one of its own.
    opened = "import os\nfor number in range(60, 200): os.dup2(2, number)\n"
    monkeypatch.setattr(module, "_SCRIPT", opened + module._SCRIPT)
    server = ForkServer(["decimal"])
    kept = os.dup2(2, 150)
    process, (pid, _, has_imported) = spawned(server, monkeypatch, spawned_child.tell, 0)
    process.join(550)
    os.close(kept)
    server.close()
    assert pid != process.pid
    assert has_imported


def test_without_a_server_python_is_started(tmp_path: Path) -> None:
    server = ForkServer([])
    server.close()
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    ran = run(server, program, "a")
    assert ran.stdout == "['a']\n"
    assert ran.returncode == 3
    assert "no forkserver" in ran.stderr


def test_a_worker_with_other_variables_of_imports_is_a_new_python(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint(os.environ['HF_HOME'], 'numpy' in sys.modules)\n")
    ran = run(server, program, env={**os.environ, "HF_HOME": "/mine"})
    assert (ran.stdout, ran.returncode) == ("/mine False\n", 0)
    assert "with another HF_HOME" in ran.stderr
    ran = run(server, program, env={**os.environ, "HF_HOME": "", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"})
    assert "with another HF_HOME:" in ran.stderr


def test_a_client_that_says_nothing_holds_nobody_up(server: ForkServer, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(sorted(map(int, os.listdir('/proc/self/fd'))))\n")
    alone = run(server, program).stdout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(shlex.split(server.executable)[-1])
        assert run(server, program).stdout == alone  # nor does a fork keep another client's connection
        silent.send(b"no request")
        assert run(server, program).stdout == alone


def test_what_it_forked_goes_on_without_the_server(tmp_path: Path) -> None:
    server = ForkServer([])
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('here', flush=True)\nprint(sys.stdin.read())\n")
    command = [*shlex.split(server.executable), str(program)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "here\n"
    server.close()
    assert client.poll() is None
    assert client.communicate("still", timeout=550)[0] == "still\n"


def test_a_program_runs_once_though_the_server_dies_as_it_has_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = (
        "import os, signal\nfork = os.fork\n"
        "def dying():\n    pid = fork()\n    if pid: os.kill(os.getpid(), signal.SIGKILL)\n    return pid\n"
        "os.fork = dying\n"
    )
    monkeypatch.setattr(module, "_SCRIPT", dies + module._SCRIPT)
    server = ForkServer([])
    program = tmp_path / "program.py"
    program.write_text("print('ran')\n")
    client = subprocess.Popen([*shlex.split(server.executable), str(program)], stdout=subprocess.PIPE, text=True)
    assert client.communicate(timeout=550)[0] == "ran\n"
    server.close()


def test_a_server_that_dies_while_it_imports_keeps_nobody_waiting(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('ran')\n")
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        server = ForkServer(["endless"])
    client = subprocess.Popen([*shlex.split(server.executable), str(program)], stdout=subprocess.PIPE, text=True)
    wait_until_connected(server)
    server.close()
    assert client.communicate(timeout=550)[0] == "ran\n"


def wait_until_connected(server: ForkServer) -> None:
    """Wait until a client is in the server's queue: its connection has the server's address."""
    address = shlex.split(server.executable)[-1]
    while sum(line.endswith(address) for line in Path("/proc/net/unix").read_text().splitlines()) < 2:
        time.sleep(0.05)


def test_without_a_place_for_its_socket_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    forkserver.cache_clear()
    assert forkserver() is None
    forkserver.cache_clear()


def test_the_server_ends_with_the_process_that_started_it() -> None:
    source = (
        "import os, sys\n"
        "from verl_multiturn.cpu_processes.handle import ForkServer\n"
        "print(ForkServer([])._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    server = psutil.Process(int(driver.stdout.readline()))
    driver.communicate(timeout=550)
    server.wait(550)


def test_what_it_imports_leaves_ray_to_the_workers() -> None:
    # Ray's core keeps the environment as it was when Ray was imported, and each worker has an environment of its own.
    names = ("ray", "verl", "transfer_queue", "sglang.srt.entrypoints.http_server")
    ran = run_warm("-c", f"import sys\nprint([name for name in {names} if name in sys.modules])")
    assert ran.stdout == f"{list(names[-1:])}\n", ran.stderr


def test_a_server_that_has_imported_ray_forks_no_worker_of_it(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("")
    worker, other = tmp_path / "default_worker.py", tmp_path / "program.py"
    other.write_text("import sys\nprint('ray' in sys.modules)\n")
    worker.write_text("import os, sys\nprint('ray' in sys.modules, os.environ['SGLANG_EXTERNAL_MODEL_PACKAGE'])\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SGLANG_EXTERNAL_MODEL_PACKAGE": "models"}
    server = ForkServer(["ray"], environment)
    try:
        fork = run(server, other, env=environment)
        ran = run(server, worker, env={**environment, "RAY_JOB_ID": "01", "RAY_RAYLET_PID": str(os.getpid())})
    finally:
        server.close()
    assert fork.stdout == "True\n"
    assert ran.stdout == "False models\n"
    said = "the forkserver has started with another RAY_JOB_ID, RAY_RAYLET_PID: this process imports everything itself"
    assert said in ran.stderr
