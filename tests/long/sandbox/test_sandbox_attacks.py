"""Attacks on the sandbox are blocked: the quick ones, and all of them; and the checks see those that are not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.long.sandbox.sandbox_attacks import ATTACKS, IN_MANY, Attack, run_attacks
from tests.long.sandbox.sandbox_host import Host

pytestmark = pytest.mark.slow


def test_there_are_attacks_enough() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) >= 45
    cells = [attack.cells for attack in ATTACKS]
    assert len(set(cells)) == len(cells)


QUICK = (
    "read_", "write_outside", "tcp", "udp", "unix", "abstract", "ptrace", "process_", "signal_", "namespaces", "mounts",
    "daemon_outlives_the_conv", "keys", "foreign", "frames", "stolen", "second", "pickles", "exit", "files_for",
    "sockets_", "shared_memory_", "huge", "inotify", "asynchronous", "out_of", "leases", "message", "pipe_and", "rule",
    "files_of", "core_limit",
)  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("begin", [QUICK, pytest.param("", marks=pytest.mark.long)], ids=["quick", "all"])
async def test_attacks_are_blocked(begin: str | tuple[str, ...]) -> None:
    attacks = [attack for attack in ATTACKS if attack.name.startswith(begin)]
    assert len(attacks) > 30
    assert {name: problems for name, problems in (await run_attacks(attacks, "bwrap")).items() if problems} == {}


async def test_attacks_are_blocked_where_the_packages_are_seen() -> None:
    attacks = [attack for attack in ATTACKS if attack.name.startswith(WITHOUT_ROOT)]
    found = await run_attacks(attacks, "bwrap", packages=True)
    assert {name: problems for name, problems in found.items() if problems} == {}


WITHOUT_ROOT = ("out_of_memory", "leases", "shared_memory_of", "sockets_in", "write_python", "signal_o", "write_id",
                "files_of_dead", "read_mounts")  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_ROOT)
def test_attacks_are_blocked_for_a_user_without_rights(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.sandbox_attacks", "--without-root", "--packages", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=550)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["blocked"] == last["attacks"] > 0, done.stdout


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("read_secret_file", "it read the secret"),
        ("read_home", "it read the secret"),
        ("read_checkout", "it won: WON checkout"),
        ("read_processes", "it won: WON process"),
        ("read_proc_of_others", "it read the secret"),
        ("write_outside", "was written to"),
        ("tcp_by_address", "was reached"),
        ("tcp_by_name", "was reached"),
        ("udp", "was reached"),
        ("unix_socket", "was reached"),
        ("abstract_socket", "was reached"),
        ("daemon_outlives_the_wall_clock", "is left"),
        ("files_for_the_next", "was written to"),
    ],
)
async def test_the_checks_see_what_weaker_isolation_lets_through(name: str, seen: str) -> None:
    """Run attacks without namespaces that do no harm when they succeed; most other attacks may not be run so."""
    attacks = [attack for attack in ATTACKS if attack.name == name]
    problems = (await run_attacks(attacks, "subprocess"))[name]
    assert any(seen in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("cells", "seen"),
    [
        (("print('WON x')",), "it won: WON x"),
        (
            ("import time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(2)",),
            "there were",
        ),
        (
            (
                "sys.displayhook = print\nimport builtins; builtins.repr = str; sys.displayhook = lambda v: None",
                "'honest 2'",
            ),
            "was answered",
        ),
        (("os._exit(0)", "'honest 2'"), None),
    ],
)
async def test_the_checks_see_processes_and_answers(cells: tuple[str, ...], seen: str | None) -> None:
    problems = (await run_attacks([Attack("made_up", cells)], "subprocess"))["made_up"]
    assert any(seen in problem for problem in problems) if seen else problems == []


@pytest.mark.parametrize("name", sorted(IN_MANY))
async def test_an_attack_in_many_processes_that_no_limit_stops_is_seen(name: str) -> None:
    assert name in {attack.name for attack in ATTACKS}
    assert (await run_attacks([Attack(name, ("1",))], "subprocess"))[name] == ["no limit stopped it"]


HARMS: dict[str, Callable[[Host], object]] = {
    "changed": lambda host: host._files[0].write_text("x"),
    "appeared": lambda host: (host._public / "x").touch(),
    "was written to": lambda host: (host._public / host.token).touch(),
    "the victim was touched": lambda host: host._victim.kill() or host._victim.wait(),
    "we got the signals [10]": lambda host: os.kill(os.getpid(), signal.SIGUSR1),
    "environment changed": lambda host: os.environ.update(SANDBOX_ATTACK_SECRET="x"),
}


@pytest.mark.parametrize("seen", list(HARMS))
def test_the_host_notices_harm(seen: str) -> None:
    with Host(everywhere=False) as host:
        assert host.harm() == []
        HARMS[seen](host)
        assert any(seen in problem for problem in host.harm())
