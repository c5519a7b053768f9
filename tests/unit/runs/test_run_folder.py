"""A run's folder: nothing in it is lost, and nothing of another run is taken for this one's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from omegaconf import OmegaConf

from tests.recipe_scripts import RECIPES
from tests.support.warm_python import light_python
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import copy_recipe
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import RunPlan, plan_run
from verl_multiturn.runs.run import _resumes_from_path, run_recipe
from verl_multiturn.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow

# Stand-ins: the trainer logs STEPS steps, as verl's logger does, which empties its file first.
PYTHON = """#!{python}
import json, os, sys, time
if "verl.trainer.main_ppo" not in sys.argv:
    os.execv({rows!r}, [{rows!r}, *sys.argv[1:]])
print(os.environ.get("SAYS", "trained"))
exec(os.environ.get("BEFORE", ""))
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    first = int(os.environ.get("FIRST", "1"))
    for step in range(first, first + int(os.environ.get("STEPS", "2"))):
        exec(os.environ.get("EACH", ""))
        data = {{"training/global_step": step, "critic/score/mean": float(os.environ.get("REWARD", "0.5"))}}
        file.write(json.dumps({{"step": step, "data": data}}) + "\\n")
        file.flush()
        time.sleep(float(os.environ.get("PAUSE", "0")))
"""
PREPARE = """
import os, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet
folder = Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir(parents=True, exist_ok=True)
for split in ("train", "test"):
    row = {
        "words": " ".join(sys.argv[1:]), "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"},
        "prompt": [{"role": "user", "content": "1 + 1 ="}],
    }
    pyarrow.parquet.write_table(pa.Table.from_pylist([row] * 256), folder / f"{split}.parquet")
    exec(os.environ.get("PREPARING", ""))
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-ins in place, and return the override that names the script of the rows."""
    python, script = tmp_path / "python", tmp_path / "rows" / "prepare.py"
    python.write_text(PYTHON.format(python=sys.executable, rows=light_python()))
    python.chmod(0o755)
    script.parent.mkdir()
    script.write_text(PREPARE)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setattr("verl_multiturn.runs.run.compose_run", compose_quickly)
    return [f"recipe.prepare_data={script}"]


@cache
def compose_once(name: str, smoke: bool, seed: int | None) -> Any:
    return compose_run(plan_run(name, smoke=smoke, seed=seed))


def compose_quickly(plan: RunPlan) -> Any:
    """Compose a run as `compose_run` does; Hydra composes each recipe once, and these tests' overrides are put in."""
    config = deepcopy(compose_once(plan.name, plan.smoke, plan.seed))
    for word in (f"recipe.out={plan.out}", *plan.overrides):
        key, _, value = word.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return config


def start(name: str, out: Path, overrides: list[str], only_prepare: bool = False, **options: Any) -> int:
    return run_recipe(plan_run(name, out=out, overrides=overrides, **options), only_prepare=only_prepare)


def result(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return found


def words(out: Path) -> str:
    import pyarrow.parquet

    return str(pyarrow.parquet.read_table(out / "data" / "train.parquet")["words"][0])


def test_a_resumed_run_keeps_its_curve(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("STEPS", "1")
    for step in (1, 2, 3):
        monkeypatch.setenv("FIRST", str(step))
        assert start("gsm8k_multiturn", out, recipe) == 0
        assert result(capfd)["steps"] == step
        (out / "checkpoints").mkdir(exist_ok=True)
        (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
        (out / "checkpoints" / f"global_step_{step}").mkdir()
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["metrics.2.jsonl", "metrics.3.jsonl", "metrics.jsonl"]
    with pytest.raises(ConfigError, match="has a checkpoint of 'gsm8k_multiturn', from which 'retool' would resume"):
        start("retool", out, recipe)
    # A run that begins anew reports its own steps alone, and the others are kept.
    assert start("gsm8k_multiturn", out, [*recipe, "trainer.resume_mode=disable"]) == 0
    assert result(capfd)["steps"] == 1
    assert len(list((out / "earlier" / "1").glob("metrics*.jsonl"))) == 3
    # A later start does not resume from this one's files.
    assert (out / "earlier" / "1" / "checkpoints" / "global_step_3").is_dir()
    assert start("gsm8k_multiturn", out, recipe) == 0
    assert result(capfd)["steps"] == 1


def test_what_a_user_has_there_is_kept(recipe: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for name in ("records/mine.txt", "validation/mine.txt", "train.log", "metrics.jsonl", "thesis.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    for _ in range(2):
        assert start("gsm8k_multiturn", out, recipe, smoke=True) == 0
        assert result(capfd)["steps"] == 2
    kept = [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    first = out / "earlier" / "1"
    assert set(kept) == {
        out / "thesis.txt",
        *(first / name for name in ("records/mine.txt", "validation/mine.txt", "train.log", "metrics.jsonl")),
    }
    assert (out / "earlier" / "2" / "metrics.jsonl").is_file()
    # Rows that no run made are not replaced.
    (out / "data" / ".prepared").unlink()
    with pytest.raises(ConfigError, match="has rows that no run made, and this run would replace them"):
        start("gsm8k_multiturn", out, recipe, smoke=True)
    assert start("gsm8k_multiturn", out, recipe, only_prepare=True) == 0  # they are used


def test_checkpoints_elsewhere_are_not_moved(recipe: list[str], tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "another").mkdir(parents=True)
    elsewhere = [*recipe, f"trainer.default_local_dir={models}", "trainer.resume_mode=disable"]
    for _ in range(2):
        assert start("gsm8k_multiturn", tmp_path / "out", elsewhere) == 0
    assert (tmp_path / "out" / "earlier" / "1").is_dir()
    assert (models / "another").is_dir()


def test_a_move_that_was_interrupted_goes_on(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for name in ("checkpoints/global_step_1/model", "train.log", "metrics.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    real, moved = shutil.move, []

    def move(source: Path, target: Path) -> None:
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(source.name)
        real(source, target)

    monkeypatch.setattr(shutil, "move", move)
    with pytest.raises(ConfigError, match="No space left"):
        start("gsm8k_multiturn", out, [*recipe, "trainer.resume_mode=disable"])
    assert moved == ["checkpoints"]  # so that the next start does not resume from them
    monkeypatch.setattr(shutil, "move", real)
    assert start("gsm8k_multiturn", out, recipe) == 0
    assert [path.name for path in (out / "earlier").iterdir()] == ["1"]
    assert sorted(path.name for path in (out / "earlier" / "1").iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "train.log",
    ]
    assert start("gsm8k_multiturn", out, recipe) == 0
    assert sorted(path.name for path in (out / "earlier").iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("trainer", "mode", "path", "resumes"),
    [
        ("verl.trainer.sft_trainer", "auto", "/x/global_step_1", True),
        ("verl.trainer.sft_trainer", "auto", None, False),
        ("verl.trainer.sft_trainer", "disable", "/x/global_step_1", False),
        ("verl.trainer.main_ppo", "auto", "/x/global_step_1", False),
        ("verl.trainer.main_ppo", "resume_path", "/x/global_step_1", True),
    ],
)
def test_a_named_checkpoint_is_resumed_as_the_trainer_does(
    trainer: str, mode: str, path: str | None, resumes: bool
) -> None:
    config = {"recipe": {"trainer": trainer}, "trainer": {"resume_mode": mode, "resume_from_path": path}}
    assert _resumes_from_path(config) == resumes


def test_a_run_that_resumes_from_a_named_checkpoint_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("mine")
    RunFolder(tmp_path).begin("retool", False, {"resume_mode": "auto"}, resumes=True)
    assert not (tmp_path / "earlier").exists()


def test_an_interruption_while_the_configuration_is_composed_is_told(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def compose(plan: RunPlan) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr("verl_multiturn.runs.run.compose_run", compose)
    before = signal.getsignal(signal.SIGTERM)
    assert start("gsm8k_multiturn", tmp_path / "out", recipe) == 130
    assert "interrupted; " in capfd.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_rows_are_those_of_this_run(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def prepare(name: str = "smollm2", **options: Any) -> int:
        return start(name, out, recipe, only_prepare=True, **options)

    assert prepare(seed=1) == 0
    assert "train.parquet (256)" in capfd.readouterr().out
    made = (out / "data" / "train.parquet").stat().st_mtime_ns
    assert prepare(seed=1) == 0
    assert "rows: those of an earlier start" in capfd.readouterr().out
    assert (out / "data" / "train.parquet").stat().st_mtime_ns == made
    # Half of them are replaced: neither half is taken for rows.
    monkeypatch.setenv("PREPARING", "os._exit(7)")
    assert prepare(seed=2) == 7
    monkeypatch.delenv("PREPARING")
    assert prepare(seed=1) == 0
    assert words(out).endswith("--seed 1")
    # The user's own rows in their place are used, and not replaced.
    made = (out / "data" / "train.parquet").read_bytes()
    (out / "data" / "train.parquet").write_bytes(made + b"mine")
    assert prepare(seed=2) == 0
    assert (out / "data" / "train.parquet").read_bytes() == made + b"mine"
    (out / "data" / "train.parquet").unlink()
    assert prepare(seed=1) == 0
    # Another recipe's, in the same folder.
    assert prepare("quickstart") == 0
    assert "--seed 1" not in words(out)
    # The user's own source stays for runs that name none, with a message.
    assert prepare("gsm8k_multiturn", data="mine.jsonl") == 0
    capfd.readouterr()
    assert prepare("gsm8k_multiturn") == 0
    assert "made from mine.jsonl" in capfd.readouterr().out
    # Where the trainer reads other files, none are made.
    elsewhere = [*recipe, "data.train_files=/a.parquet", "data.val_files=/b.parquet"]
    assert start("quickstart", tmp_path / "none", elsewhere, only_prepare=True) == 0
    assert not (tmp_path / "none" / "data").exists()


def test_one_run_at_a_time(recipe: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "gsm8k_multiturn", "--out", str(out), *recipe]
    noted = tmp_path / "daemon"
    daemon = "import subprocess; daemon = subprocess.Popen(['sleep', '600'], close_fds=False)"
    note = f"open({str(noted)!r}, 'w').write(f'{{daemon.pid}}\\n')"
    environment = {**os.environ, "BEFORE": f"{daemon}; {note}; sys.stdout.flush(); time.sleep(600)"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        while not (noted.is_file() and noted.read_text().endswith("\n")):
            assert other.poll() is None
            time.sleep(0.05)
        with pytest.raises(ConfigError, match=rf"another run uses .*with its .lock open: .*{other.pid} \w+"):
            start("gsm8k_multiturn", out, recipe)
        other.kill()  # its trainer ends with it, its children go on
        other.wait()
    left = psutil.Process(int(noted.read_text()))
    trainers = [
        each for each in psutil.process_iter(["cmdline"]) if f"recipe.out={out}" in (each.info["cmdline"] or [])
    ]
    psutil.wait_procs(trainers, timeout=60)
    with pytest.raises(ConfigError, match=rf"another run uses .*with its .lock open: {left.pid} sleep[)]"):
        start("gsm8k_multiturn", out, recipe)
    left.kill()


def test_a_machine_on_which_ray_cannot_start_is_refused_before_anything_is_made(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"HOME='/proc/nowhere': Ray cannot write its token to"):
        start("gsm8k_multiturn", out, recipe)
    assert not out.exists()
    assert start("gsm8k_multiturn", out, recipe, only_prepare=True) == 0  # which starts no Ray


def test_a_start_tells_nothing_of_an_earlier_one(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "checkpoints" / "global_step_1").mkdir(parents=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")  # it resumes: all is kept
    monkeypatch.setenv("SAYS", "CUDA out of memory")
    assert start("gsm8k_multiturn", out, recipe) == 0
    monkeypatch.setenv("SAYS", "")
    monkeypatch.setenv("BEFORE", "sys.exit(0)")
    capfd.readouterr()
    assert start("gsm8k_multiturn", out, recipe) == 0
    assert result(capfd)["metrics"] is None
    monkeypatch.setenv("BEFORE", "os.kill(os.getpid(), 9)")
    assert start("gsm8k_multiturn", out, recipe) == 1
    told = capfd.readouterr().out
    assert "the trainer was killed by signal 9 while importing verl" in told
    assert "CUDA" not in told


def test_a_display_that_fails_ends_no_training(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EACH", 'step == 2 and file.write(\'{"step": 2, "da\\n\')')
    assert start("gsm8k_multiturn", tmp_path / "torn", recipe) == 0
    assert result(capfd)["steps"] == 2
    # Nothing reads the output.
    command = [light_python(), "-m", "verl_multiturn.cli", "run", "gsm8k_multiturn", "--out", str(tmp_path / "closed")]
    environment = {**os.environ, "STEPS": "4", "PAUSE": "0.5", "EACH": "", "PYTHONIOENCODING": "ascii"}
    environment["BEFORE"] = "sys.stdout.buffer.write(b'sch\\xffn')"
    with subprocess.Popen([*command, *recipe], env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(550) == 0
    assert len((tmp_path / "closed" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("output", ["true", "full"])
def test_an_output_that_nobody_reads_ends_no_run(recipe: list[str], tmp_path: Path, output: str) -> None:
    out = tmp_path / "out"
    command = [light_python(), "-m", "verl_multiturn.cli", "run", "gsm8k_multiturn", "--out", str(out), *recipe]
    place = "| true" if output == "true" else "> /dev/full"
    for _ in range(2):  # the second one also reports the first one's rows and results
        ran = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f'"$@" {place}', "bash", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
    assert (out / "metrics.jsonl").is_file()
    assert (out / "earlier" / "1" / "metrics.jsonl").is_file()


def test_the_nodes_of_one_run_share_its_rows(recipe: list[str], tmp_path: Path) -> None:
    command = [light_python(), "-m", "verl_multiturn.cli", "run", str(RECIPES / "retool" / "sft"), "--prepare"]
    command += ["--out", str(tmp_path / "out"), "trainer.nnodes=2", *recipe]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                subprocess.Popen(command, env={**os.environ, "NODE_RANK": rank}, stdout=subprocess.PIPE)
            )
            for rank in "01"
        ]
        assert [node.wait(550) for node in nodes] == [0, 0]
        told = [node.stdout.read().decode() for node in nodes if node.stdout is not None]
    assert sorted("those of an earlier start" in each for each in told) == [False, True]


def test_an_interruption_ends_the_script_of_the_rows(recipe: list[str], tmp_path: Path) -> None:
    # Python itself: the killed process is not a fork of another process.
    Path(os.environ["PYTHON"]).write_text(PYTHON.format(python=sys.executable, rows=sys.executable))
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "gsm8k_multiturn", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PREPARING": "import time; time.sleep(600)"}
    with subprocess.Popen([*command, *recipe], env=environment) as run:
        while not (tmp_path / "out" / "data" / "train.parquet").is_file():
            time.sleep(0.05)
        run.terminate()
        assert run.wait(550) == 130
    assert subprocess.run(["pgrep", "-f", str(tmp_path / "out")], check=False).returncode == 1
    assert (tmp_path / "out" / "data" / ".preparing").is_file()


def test_what_cannot_be_used_is_told_in_one_message(recipe: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lies within the recipes themselves"):
        copy_recipe("torl", RECIPES / "mine")
    with pytest.raises(ConfigError, match=r"total_training_steps=two: expected a number"):
        start("gsm8k_multiturn", tmp_path / "x", [*recipe, "trainer.total_training_steps=two"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out '.*file' is no folder; name a new one"):
        start("gsm8k_multiturn", tmp_path / "file", recipe)
    with pytest.raises(ConfigError, match=r"'recipe.out=' contradict each other"):
        start("gsm8k_multiturn", tmp_path / "x", [*recipe, "recipe.out="])
    for name in ("quickstart", "smollm2"):
        script = [light_python(), str(RECIPES / name / "prepare_data.py"), "--out", str(tmp_path / "y")]
        refused = subprocess.run([*script, "--source", "mine"], capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "makes its own rows; leave --data mine out" in refused.stderr
