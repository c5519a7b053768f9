"""The threads of a CPU run: they sleep while they wait, and the user's setting counts and is logged."""

import os
import subprocess
import sys

import pytest

from tests.integration.test_refusals import composed

pytestmark = pytest.mark.stack

_SHOWN = (
    "from verl_multiturn.cpu_processes.environment import SPEED as s; print(s['OMP_NUM_THREADS'], s['OMP_WAIT_POLICY'])"
)


def test_a_machine_with_one_core() -> None:
    code = f"import os; os.cpu_count = lambda: 1; {_SHOWN}"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["1", "passive"]


def test_what_the_user_sets_counts_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.cpu.activate import activate
    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.cpu_processes.environment import SPEED

    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # so that the changes of `activate` are undone
    monkeypatch.delenv("OMP_WAIT_POLICY")
    activate()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("77", "passive")
    fill_in(composed(), 64)
    assert "OMP_NUM_THREADS=77 counts" in capfd.readouterr().err
    monkeypatch.setenv("VERL_MULTITURN_THREADS", "77")  # `verl-multiturn run` chose it, and not the user
    fill_in(composed(), 64)
    assert "OMP_" not in capfd.readouterr().err
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, SPEED[name])
    fill_in(composed(), 64)
    assert "OMP_" not in capfd.readouterr().err
