"""The driver of a CPU run is the first fork of the run's server, and is as good as a process that was started."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_multiturn.cpu_processes import fork_worker
from verl_multiturn.cpu_processes.environment import run_variables
from verl_multiturn.cpu_processes.forkserver import ADDRESS, EARLY
from verl_multiturn.cpu_processes.handle import ForkServer, fork_command
from verl_multiturn.runs import processes
from verl_multiturn.runs.environment import environment_of, is_forked
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.runs.processes import fork_server, run_watched
from verl_multiturn.runs.run_folder import RunFolder
from verl_multiturn.runs.training import Training

pytestmark = pytest.mark.slow

FACTS = """
import json, locale, os, resource, signal, sys
taken = ("NOFILE", "CORE", "STACK", "NPROC", "AS")
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "cwd": os.getcwd(),
    "flags": list(sys.flags), "utf8": locale.getencoding(), "environment": dict(os.environ),
    "streams": [[each.encoding, each.errors, each.line_buffering] for each in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in taken],
    "umask": os.umask(0o22), "niceness": os.getpriority(os.PRIO_PROCESS, 0), "leads": os.getpgid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals()) if number != signal.SIGINT],
    "lock": os.fstat(int(sys.argv[1])).st_ino, "stdin": os.fstat(0).st_ino,
    "pycache": [sys.pycache_prefix, sys.dont_write_bytecode],
}))
"""


def started(program: str, log: Path, server: ForkServer | None, *words: str, **options: Any) -> int:
    """Run a program as a run does its trainer."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": ":backslashreplace"}
    environment |= options.pop("environment", {})
    return run_watched([sys.executable, "-c", program, *words], environment, log, server=server, **options)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setattr(processes, "RUNS_MODULES", ("decimal", EARLY, "colorsys"))
    with fork_server({**os.environ, "PYTHONIOENCODING": ":backslashreplace"}, wanted=True) as found:
        assert found is not None
        yield found


def test_the_driver_is_a_fork(server: ForkServer, tmp_path: Path) -> None:
    program = "import os, sys; print(os.getppid(), 'decimal' in sys.modules, os.getsid(0))"
    assert started(program, tmp_path / "log", server) == 0
    assert (tmp_path / "log").read_text() == f"{server.pid} True {server.pid}\n"


def test_a_fork_is_as_what_was_started_before(server: ForkServer, tmp_path: Path) -> None:
    facts = []
    with open(tmp_path / "lock", "w") as lock:
        for each in (None, server):
            log = tmp_path / f"log{len(facts)}"
            environment = run_variables({**os.environ, "SAID": "grüß dich"})
            words = (str(lock.fileno()), "a b", "")
            assert started(FACTS, log, each, *words, lock=lock.fileno(), environment=environment) == 0
            facts.append(json.loads(log.read_text()))
    before, now = facts
    assert now["environment"].pop(ADDRESS) == server.address
    for each in facts:
        del each["environment"][processes._MARK]
    assert now == before


def test_the_log_has_the_last_lines_of_a_driver_that_is_killed(server: ForkServer, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "print('first'); print('second', file=sys.stderr); print('third', end='')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert started(program, tmp_path / "log", server) == -signal.SIGKILL
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird"


def test_a_module_is_the_main_one_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of `atexit` run after it, and pickle by the module's name."""
    (tmp_path / "program.py").write_text(
        "import atexit, pickle, sys\n"
        "class Thing: pass\n"
        "atexit.register(lambda: print(len(pickle.dumps(Thing())), sys.modules['__main__'].__spec__.name, sys.argv))\n"
    )
    monkeypatch.setattr(processes, "RUNS_MODULES", ("helper",))
    (tmp_path / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    said = []
    # Without the current folder a new Python finds the helper by the first entry of its path.
    for changes in ({}, {"PYTHONSAFEPATH": "1"}):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), **changes}
        with fork_server(environment, wanted=True) as server:
            for each in (None, server):
                log = tmp_path / f"log{len(said)}"
                assert run_watched([sys.executable, "-m", "program", "a b"], environment, log, server=each) == 0
                said.append(log.read_text())
    assert len(set(said)) == 1
    assert said[0].endswith(f" program ['{tmp_path}/program.py', 'a b']\n")


def test_what_changes_the_limits_of_a_run_holds_in_its_driver(server: ForkServer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    assert started(program, tmp_path / "log", server) == 0
    assert (tmp_path / "log").read_text() == f"{soft}\n"
    assert hard >= soft


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError('no')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.abort()", -signal.SIGABRT),
    ],
)
def test_its_end_is_the_commands(program: str, status: int, server: ForkServer, tmp_path: Path) -> None:
    assert started(program, tmp_path / "log", server) == status


def test_a_second_try_is_a_fork_too_and_nothing_of_the_first_is_there(server: ForkServer, tmp_path: Path) -> None:
    leaves = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, os.getppid(), flush=True)\nos._exit(1)\n"
    )
    for _ in range(2):
        (tmp_path / "log").unlink(missing_ok=True)
        assert started(leaves, tmp_path / "log", server) == 1
        child, parent = map(int, (tmp_path / "log").read_text().split())
        assert parent == server.pid
        assert is_gone(child)
    assert server.is_alive()


def is_gone(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True


def test_the_process_id_of_the_driver_is_known(server: ForkServer, tmp_path: Path) -> None:
    clients = list[int]()
    assert started("import os; print(os.getpid())", tmp_path / "log", server, begun=clients.append) == 0
    assert server.fork_of(clients[0]) == int((tmp_path / "log").read_text())
    assert server.fork_of(1) == 1


def test_what_is_read_at_import_and_differs_makes_it_a_new_python(server: ForkServer, tmp_path: Path) -> None:
    program = "import os, sys; print(os.getppid(), os.environ['HF_HOME'], 'decimal' in sys.modules)"
    assert started(program, tmp_path / "log", server, environment={"HF_HOME": "/theirs"}) == 0
    said, shown = (tmp_path / "log").read_text().splitlines()
    assert said == (
        "verl-multiturn: the forkserver has started with another HF_HOME: this process imports everything itself"
    )
    assert shown == f"{os.getpid()} /theirs False"


def test_without_the_server_it_is_a_new_python(server: ForkServer, tmp_path: Path) -> None:
    server.close()
    assert started("import os; print(os.getppid())", tmp_path / "log", server) == 0
    said, shown = (tmp_path / "log").read_text().splitlines()
    assert said.startswith("verl-multiturn: no forkserver (")
    assert shown == str(os.getpid())


def test_a_server_that_has_ended_is_told_and_the_run_goes_on(
    server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    config = {"trainer": {"total_training_steps": 1}}
    command = [sys.executable, "-c", "import os; print(os.getppid())"]
    training = Training(command, config, RunFolder(tmp_path), tmp_path / "metrics.jsonl", None, is_ppo=False)
    with RunFolder(tmp_path).held() as lock:
        assert training.run(dict(os.environ), time.time(), lock, server).status == 0
    assert "the forkserver has ended: each process of the run imports everything itself\n" in capsys.readouterr().out
    assert (tmp_path / "train.log").read_text() == f"{os.getpid()}\n"


def test_a_server_that_cannot_be_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    (tmp_path / ("x" * 120)).mkdir()
    with fork_server(os.environ, wanted=True) as found:
        assert found is None
    assert capsys.readouterr().out == (
        "no forkserver (AF_UNIX path too long): each process of the run imports everything itself\n"
    )
    with fork_server(os.environ, wanted=False) as found:
        assert found is None
    assert not capsys.readouterr().out


def test_a_thread_in_the_server_is_no_danger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='theirs', daemon=True).start()\n"
    )
    monkeypatch.setattr(processes, "RUNS_MODULES", ("threaded",))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with fork_server(environment, wanted=True) as server:
        assert started("print('ran')", tmp_path / "log", server) == 0
    said, shown = (tmp_path / "log").read_text().splitlines()
    assert "has started with a thread of its own (theirs): this process imports everything itself" in said
    assert shown == "ran"


def waits(path: Path) -> str:
    """Return a module whose import lasts until a file is there."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.02)\n"


def test_a_driver_does_not_wait_for_what_only_workers_need(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(waits(tmp_path / "early"))
    (tmp_path / "late.py").write_text(waits(tmp_path / "late"))
    (tmp_path / "program.py").write_text("import sys; print('late' in sys.modules)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ForkServer(("early", EARLY, "late"), environment)
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    try:
        command = fork_command(server.address)
        worker = subprocess.Popen([*command, str(tmp_path / "program.py")], **options)
        driver = subprocess.Popen([*command, "-m", "program"], cwd=tmp_path, **options)
        while sum(line.endswith(server.address) for line in Path("/proc/net/unix").read_text().splitlines()) < 3:
            time.sleep(0.02)
        (tmp_path / "early").touch()
        assert driver.stdout is not None
        assert driver.stdout.readline() == "False\n"
        assert worker.poll() is None
        (tmp_path / "late").touch()
        assert worker.communicate(timeout=120)[0] == "True\n"
        assert (driver.communicate(timeout=120)[0], driver.returncode) == ("", 0)
    finally:
        server.close()


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(waits(tmp_path / "early"))
    server = ForkServer(("early",), {**os.environ, "PYTHONPATH": str(tmp_path)})
    text = Path(fork_worker.__file__).read_text()
    short = text.replace("_LONGEST_S = 300.0", "_LONGEST_S = 0.2")
    assert short != text
    (tmp_path / "client.py").write_text(short)
    try:
        words = ["-c", "import sys; print('ran', 'early' in sys.modules)"]
        client = [sys.executable, "-I", "-S", str(tmp_path / "client.py"), server.address, *words]
        with open(tmp_path / "log", "w") as log:  # no pipe: the server has it, too, until it looks at the request
            subprocess.run(client, stdout=log, stderr=log, check=True)
        (tmp_path / "early").touch()  # the server goes on, and finds a client that has gone
        again = subprocess.run([*fork_command(server.address), *words], capture_output=True, text=True, check=True)
    finally:
        server.close()
    said, shown = (tmp_path / "log").read_text().splitlines()
    assert shown == "ran False"
    assert "no forkserver (timed out): this process imports everything itself" in said
    assert again.stdout == "ran True\n"


ENDS = """
import os, signal, sys, time
from pathlib import Path
def note(text):
    with Path(sys.argv[1]).open("a") as ended: ended.write(text)
def end(*_):
    note("SIGTERM ")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), os.getppid(), flush=True)
try:
    while True: time.sleep(0.02)
finally:  # as Ray ends its processes
    time.sleep(0.3)
    note("cleaned")
"""
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from verl_multiturn.cpu_processes import handle
from verl_multiturn.runs import processes
processes.RUNS_MODULES = ()
handle._CLIENT = {client!r}
for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    signal.signal(signum, signal.SIG_DFL)
with processes.interruptible(), processes.fork_server(os.environ, wanted=True) as server:
    processes.run_watched([sys.executable, "-c", {program!r}, {ended!r}], os.environ, Path({log!r}), server=server)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGKILL early"])
def test_a_signal_to_the_run_leaves_nothing_and_its_driver_ends_in_order(name: str, tmp_path: Path) -> None:
    log, ended = tmp_path / "log", tmp_path / "ended"
    client = Path(fork_worker.__file__)
    name, _, is_early = name.partition(" ")
    if is_early:  # before the process that the run knows can pass a signal on
        before = client.read_text()
        text = before.replace(
            "    for descriptor in inherited:\n",
            '    __import__("time").sleep(0.5)\n    for descriptor in inherited:\n',
        )
        assert text != before
        (client := tmp_path / "client.py").write_text(text)
    text = LAUNCHER.format(program=ENDS, ended=str(ended), log=str(log), client=str(client))
    temporary = tempfile.mkdtemp()  # short, for a socket
    environment = {**os.environ, "TMPDIR": temporary}
    launcher = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL, env=environment)
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert launcher.poll() is None
        time.sleep(0.02)
    driver, server = map(psutil.Process, map(int, log.read_text().split()))
    clients = [each for each in psutil.Process(launcher.pid).children() if each != server]
    launcher.send_signal(getattr(signal, name))
    launcher.wait(120)
    assert psutil.wait_procs([driver, server, *clients], timeout=60)[1] == []
    assert ended.read_text() == "SIGTERM cleaned"
    assert len(clients) == 1
    assert launcher.returncode != 0
    os.rmdir(temporary)  # nothing is there


def test_a_signal_to_the_process_that_the_run_knows_reaches_the_driver(server: ForkServer, tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(5))\n"
        "print('begun', flush=True)\nwhile True: time.sleep(0.02)\n"
    )
    log, clients = tmp_path / "log", list[int]()

    def tell() -> None:
        while not (log.is_file() and "begun" in log.read_text()):
            time.sleep(0.02)
        os.kill(clients[0], signal.SIGUSR2)

    telling = threading.Thread(target=tell)
    telling.start()
    assert started(program, log, server, begun=clients.append) == 5
    telling.join()


CPU = {"VERL_PLATFORM": "cpu", "RAY_ADDRESS": "local"}


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({}, CPU, True),
        ({}, {}, False),
        ({}, {**CPU, "VERL_PLATFORM": "nvidia"}, False),
        ({"recipe": {"trainer": "verl.trainer.sft_trainer"}}, CPU, False),
        ({"ray_kwargs": {"ray_init": {"address": "10.0.0.1:6379"}}}, CPU, False),
        ({"ray_kwargs": {"ray_init": {"runtime_env": {"py_executable": "python3"}}}}, CPU, False),
        ({"ray_kwargs": {"ray_init": None}}, CPU, True),
    ],
)
def test_which_runs_have_a_server(
    changes: dict[str, Any], environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    config = {"recipe": {"trainer": "verl.trainer.main_ppo"}, **changes}
    assert is_forked(config, environment) is expected
    monkeypatch.setenv("PYTHON", sys.executable)
    assert is_forked(config, environment) is expected
    monkeypatch.setenv("PYTHON", "/bin/true")
    assert not is_forked(config, environment)


def test_the_server_of_another_run_is_none_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "/gone/forkserver")
    plan = plan_run("quickstart", out=tmp_path / "out")
    assert ADDRESS not in environment_of(plan, {"recipe": {"on_cpu": True}, "trainer": {}})
