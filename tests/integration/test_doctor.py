"""`verl-multiturn doctor` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_python import run_warm, warm_python

pytestmark = pytest.mark.stack


START = """
import subprocess, sys, types
from verl_multiturn.cli.main import main
from verl_multiturn.observe import doctor

python, run = sys.argv.pop(1), subprocess.run

def run_forked(words, **given):
    return run([python, *words[1:]] if words[0] == sys.executable else words, **given)

doctor.subprocess = types.SimpleNamespace(**{**vars(subprocess), "run": run_forked})
main()
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork, and its children in others."""
    return run_warm("-c", START, warm_python(), "doctor", *words, **{"COLUMNS": "200", **environment})


def test_all_is_well_in_the_locked_environment() -> None:
    command = [str(Path(sys.executable).parent / "verl-multiturn"), "doctor"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "platform: cpu" in done.stdout
    assert "a program ran, isolation bwrap" in done.stdout


def test_it_says_when_verl_does_not_load_the_plugin() -> None:
    done = run(VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "sglang_async is not registered" in done.stdout
    assert "unset it" in done.stdout


@pytest.mark.parametrize(("platform", "said"), [("nvidia", "none that torch can use"), ("cpu", "VERL_PLATFORM='cpu'")])
def test_without_a_gpu_nothing_is_trained(tmp_path: Path, platform: str, said: str) -> None:
    done = run("--gpu", "--out", str(tmp_path / "out"), VERL_PLATFORM=platform)
    assert done.returncode == 1
    assert said in done.stdout
    assert "not well: sglang-kernel, flashinfer-python, flash-attn-4, GPU" in done.stderr
    assert "scripts/install_gpu.sh --without-flash-attn" in done.stdout
    assert not (tmp_path / "out").exists()


CLASSES = """
import sys
import verl
from types import ModuleType
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

package = sys.modules['theirs'] = ModuleType('theirs')
package.Mine = type('Mine', (AsyncSGLangRollout,), {})
base._ROLLOUT_REGISTRY[('sglang', 'async')] = 'theirs.Mine'
exec(REGISTERED)
RolloutReplicaRegistry.register('sglang', lambda: type('Other', (), {'__module__': 'theirs'}))
try:
    exec(REGISTERED)
except AssertionError as error:
    print(error)
"""


def test_a_class_that_derives_from_ours_is_well_and_another_is_not() -> None:
    from verl_multiturn.runs import doctor

    done = run_warm("-c", f"REGISTERED = {doctor._REGISTERED!r}\n{CLASSES}")
    assert done.returncode == 0, done.stderr[-3000:]
    well, other = done.stdout.splitlines()[-2:]
    assert well == "platform: cpu"
    assert other == "RolloutReplicaRegistry has theirs.Other under the name sglang: sglang_async cannot run"
