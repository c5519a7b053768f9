"""The launcher that recipes share, and `verl-multiturn recipe`."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli import app
from verl_multiturn.recipes import list_recipes

RECIPES = ROOT / "recipes"
GSM8K = RECIPES / "gsm8k_multiturn" / "run.sh"
LR = "actor_rollout_ref.actor.optim.lr="


def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, env=environment, check=False)


def values(flags: str, key: str) -> list[str]:
    return [flag.removeprefix(key) for flag in flags.splitlines() if flag.startswith(key)]


def test_later_flags_win() -> None:
    printed = run(GSM8K, "--smoke", "--variant", "qwen3", "--print", f"{LR}7").stdout
    assert values(printed, LR) == ["1e-6", "1e-4", "7"]
    assert values(printed, "actor_rollout_ref.model.path=") == [
        "Qwen/Qwen2.5-3B-Instruct",
        "Qwen/Qwen3-4B",
        str(RECIPES / "common" / "model"),
    ]
    assert values(printed, "trainer.experiment_name=") == ["gsm8k_multiturn-qwen3"]


def test_flags_of_a_file_are_cleaned_of_comments() -> None:
    printed = run(GSM8K, "--print").stdout
    assert not [line for line in printed.splitlines() if "#" in line or line != line.strip() or not line]
    assert values(printed, "trainer.logger=") == ["[console,file]"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "qwen9"], "unknown variant 'qwen9'; known are "),
        (["--variant"], "--variant needs a value"),
        (["--smok"], "unknown argument '--smok'; an override has the form key=value"),
        (["--variant=qwen3"], "unknown argument '--variant=qwen3'; an override has the form key=value"),
        (["--smoke", "--data", "mine.jsonl"], "--smoke makes its own data; leave --data out"),
        (["--out", "lr=1e-6"], "Hydra reads no folder named like"),
        (["--out", "größe"], "Hydra reads no folder named like"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    ran = run(GSM8K, *words)
    assert ran.returncode == 2
    assert said in ran.stderr.splitlines()[0]
    assert ran.stdout == ""


def test_a_file_of_flags_is_read(tmp_path: Path) -> None:
    flags = tmp_path / "some.flags"
    lines = ["prepare_data.py --model $out/model  # two words", "a.path=$recipe/x", "b=null", "c=1"]
    flags.write_text("\n".join([*lines, "?b=2", "?c=2", "?d=$root", "!a."]))
    script = (
        f"source {RECIPES}/common/launch.sh; recipe_dir=R; root='the root'; out='my out'; given=() prepare=()\n"
        f'read_flags {flags}; printf \'%s\\n\' "${{prepare[@]}}" -- "${{given[@]}}"'
    )
    ran = subprocess.run(["bash", "-euc", script, "bash"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["--model", "my out/model", "--", "b=null", "c=1", "c=2", "d=the root"]


def test_the_baseline_of_a_smoke_run_has_no_tool() -> None:
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path="
    script = RECIPES / "image_zoom" / "run.sh"
    assert values(run(script, "--print", "--smoke", "--variant", "no_tool").stdout, key)[-1] == "null"
    assert values(run(script, "--print", "--smoke").stdout, key)[-1].endswith("/data/tools.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "trainer.nnodes=2: start it on each node with NODE_RANK"),
        (["--variant"], "--variant needs a value"),
        (["--variant", "ppo"], "unknown variant 'ppo'; known are qwen2.5_7b"),
        (["++trainer.nnodes=two"], "trainer.nnodes=two: expected a number"),
    ],
)
def test_the_cold_start_refuses_what_cannot_work(words: list[str], said: str, tmp_path: Path) -> None:
    ran = run(RECIPES / "retool" / "sft.sh", "--out", str(tmp_path), *words, NODE_RANK="")
    assert ran.returncode == 2
    assert said in ran.stderr.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_data_is_prepared_once_and_anew_when_named(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(40)))
    words = ["--prepare", "--out", str(tmp_path / "out")]
    assert run(GSM8K, *words, "--data", str(source), PYTHON=sys.executable).returncode == 0
    train = tmp_path / "out" / "data" / "train.parquet"
    first = train.stat().st_mtime_ns
    assert run(GSM8K, *words, PYTHON=sys.executable).returncode == 0
    assert train.stat().st_mtime_ns == first
    assert run(GSM8K, *words, "--data", str(source), PYTHON=sys.executable).returncode == 0
    second = train.stat().st_mtime_ns
    assert second != first
    # Without the tool, other rows are needed, which the hub cannot give offline. The old rows must not stand in for
    # them.
    offline = run(GSM8K, *words, "--variant", "no_tool", PYTHON=sys.executable, HF_HUB_OFFLINE="1")
    assert offline.returncode != 0
    assert "'openai/gsm8k' is no local file" in offline.stderr
    # The user's own rows are used unchanged.
    (train.parent / ".prepared").unlink()
    assert run(GSM8K, *words, "--variant", "no_tool", PYTHON=sys.executable).returncode == 0
    assert train.stat().st_mtime_ns == second


def test_preparing_leaves_an_earlier_runs_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert run(GSM8K, "--smoke", "--prepare", "--out", str(tmp_path), PYTHON=sys.executable).returncode == 0
    assert (tmp_path / "data" / "train.parquet").is_file()
    assert (tmp_path / "metrics.jsonl").is_file()


# A stand-in for the trainer. It logs the step STEP as verl's logger does, which empties its file first.
TRAINER = """#!/usr/bin/env bash
case " $* " in
    *" verl.trainer.main_ppo "*)
        data='{"training/global_step": '$STEP', "critic/score/mean": 0.5}'
        echo '{"step": '$STEP', "data": '$data'}' >"$VERL_FILE_LOGGER_PATH"
        ;;
    *) exec PYTHON "$@" ;;
esac
"""


def test_a_resumed_run_keeps_its_curve(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(TRAINER.replace("exec PYTHON", f"exec {sys.executable}"))
    python.chmod(0o755)
    out = tmp_path / "out"
    assert run(GSM8K, "--smoke", "--prepare", "--out", str(out), PYTHON=sys.executable).returncode == 0
    (out / "data" / ".prepared").unlink()  # now they are the user's own rows
    for step in (1, 2, 3):
        ran = run(GSM8K, "--out", str(out), PYTHON=str(python), STEP=str(step))
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1])["steps"] == step
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["metrics.2.jsonl", "metrics.3.jsonl", "metrics.jsonl"]
    # A smoke run without a checkpoint begins anew; with a checkpoint it continues.
    for step, steps in ((1, 1), (2, 2)):
        ran = run(GSM8K, "--smoke", "--out", str(out), PYTHON=str(python), STEP=str(step))
        assert json.loads(ran.stdout.splitlines()[-1])["steps"] == steps
        (out / "checkpoints").mkdir(exist_ok=True)
        (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_rows_without_an_answer_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text(json.dumps({"question": "2+2?", "answer": "four"}) + "\n" + json.dumps({}))
    ran = run(GSM8K, "--prepare", "--out", str(tmp_path / "out"), "--data", str(source), PYTHON=sys.executable)
    assert ran.returncode != 0
    assert "expected a `question`, and an `answer` that ends in `#### 42`" in ran.stderr


def test_every_recipe_says_what_it_is() -> None:
    recipes = list_recipes()
    assert recipes.keys() >= {"gsm8k_multiturn", "torl", "retool", "search_r1", "text2sql", "tool_n1", "mixed", "otc"}
    assert all(recipes.values())


def test_a_copied_recipe_is_the_same(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "copy", "gsm8k_multiturn", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    copied = tmp_path / "recipes" / "gsm8k_multiturn" / "run.sh"
    printed = run(copied, "--smoke", "--print").stdout
    assert printed == run(GSM8K, "--smoke", "--print").stdout.replace(str(ROOT), str(tmp_path))
    named = [flag.partition("=")[2] for flag in printed.splitlines() if flag.startswith("actor_rollout_ref.model.path")]
    assert (Path(named[-1]) / "config.json").is_file()
    (tmp_path / "tool_configs" / "gsm8k.yaml").write_text("mine")
    other = CliRunner().invoke(app, ["recipe", "copy", "torl", str(tmp_path)])
    assert other.exit_code == 0, other.output
    assert (tmp_path / "tool_configs" / "gsm8k.yaml").read_text() == "mine"
    again = CliRunner().invoke(app, ["recipe", "copy", "gsm8k_multiturn", str(tmp_path)])
    assert again.exit_code == 1
    assert "exists; move it away" in again.output


def test_the_wheel_ships_the_recipes(tmp_path: Path) -> None:
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    source.mkdir()
    for name in ("verl_multiturn", "recipes", "tool_configs", "setup.py", "pyproject.toml", "README.md"):
        # A build writes into the folders that it builds from, so they are copied.
        kind = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
        (shutil.copytree if kind else shutil.copy)(ROOT / name, source / name, **kind)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(wheels), str(source)], check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(installed)
    names = "from verl_multiturn.recipes import copy_recipe, list_recipes; print(*list_recipes())"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(installed)!r}); {names}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.stdout.split() == list(list_recipes())
    chat = ROOT / "verl_multiturn" / "rollout" / "tiny_chat"  # files of `scripted_rollout`
    for path in [*chat.glob("*.json"), *chat.glob("*.jinja")]:
        assert (installed / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    shipped = installed / "verl_multiturn" / "shipped"
    for folder in ("recipes", "tool_configs"):
        here = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        there = {path.relative_to(shipped) for path in (shipped / folder).rglob("*") if path.is_file()}
        assert there == {path for path in here if "__pycache__" not in path.parts}


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "copy", "gsm9k", str(tmp_path)])
    assert ran.exit_code == 1
    assert "unknown recipe 'gsm9k'; known are " in ran.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in RECIPES.glob("*/run.sh")))
def test_every_recipe_has_its_settings_beside_the_originals(recipe: str) -> None:
    text = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
    if recipe == "smollm2":
        assert "There is no original" in text
        return
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| setting | original"))
    assert re.fullmatch(r"\| setting \| original[^|]* \| ours \| why \|", lines[start])
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    rows = [re.sub(r"`[^`]*`", "", line).split("|") for line in table]
    assert {len(cells) for cells in rows} == {6}, rows
    assert {"steps", "checkpoints"} <= {word for cells in rows for word in re.findall(r"\w+", cells[1])}


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in RECIPES.glob("*/run.sh")))
def test_a_run_neither_loses_its_model_nor_fills_the_disk(recipe: str) -> None:
    flags = run(RECIPES / recipe / "run.sh", "--print").stdout
    assert int(values(flags, "trainer.save_freq=")[-1]) > 0
    for model in ("actor", "critic"):
        assert 1 <= int(values(flags, f"trainer.max_{model}_ckpt_to_keep=")[-1]) <= 3
    assert int(values(flags, "trainer.log_val_generations=")[-1]) > 0
    assert values(flags, "trainer.validation_data_dir=")[-1].endswith(f"outputs/{recipe}/validation")
    assert int(values(flags, "data.filter_overlong_prompts_workers=")[-1]) > 1
