"""`verl-multiturn run`, by each recipe's run.sh, and `verl-multiturn recipe`."""

import contextlib
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT, has_ended
from tests.recipe_scripts import composed, run_here
from verl_multiturn.cli.main import app
from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import list_recipes
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import RunPlan, plan_run
from verl_multiturn.runs.rows import prepare_words

pytestmark = pytest.mark.slow

RECIPES = ROOT / "recipes"
GSM8K = RECIPES / "gsm8k_multiturn" / "run.sh"
_COMMAND = f"bash {GSM8K}"
LR = "actor_rollout_ref.actor.optim.lr="


def words_of(printed: str) -> list[str]:
    return shlex.split(printed.replace("\\\n", ""))


def apart(words: list[str]) -> tuple[Any, ...]:
    """Return the variables before a command, and the command's words."""
    variables = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    return dict(word.split("=", 1) for word in variables), *words[len(variables) :]


def test_later_settings_win() -> None:
    config = composed("gsm8k_multiturn", "qwen3", smoke=True, overrides=[f"{LR}6", f"{LR}7"])
    assert config.actor_rollout_ref.actor.optim.lr == 7
    assert config.actor_rollout_ref.model.path == str(RECIPES / "common" / "model")
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.trainer.experiment_name == "gsm8k_multiturn-qwen3"
    assert composed("gsm8k_multiturn", "qwen3").actor_rollout_ref.model.path == "Qwen/Qwen3-4B"


@pytest.mark.parametrize("words", [["--variant", "qwen3", "--variant", "megatron"], ["variant=[qwen3,megatron]"]])
def test_what_is_printed_is_a_command_of_verls(words: list[str], tmp_path: Path) -> None:
    """One that a user can give: Hydra alone composes it, several variants at once."""
    ran = run_here(_COMMAND, *words, "--out", str(tmp_path / "out"), "--print", f"{LR}7")
    variables, python, *command = apart(words_of(ran.stdout))
    assert variables["VERL_FILE_LOGGER_PATH"] == f"{tmp_path}/out/metrics.jsonl"
    name = f"{ROOT}/recipes/gsm8k_multiturn"
    assert [python, *command[:6]] == [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-path", name, "--config-name", "config"),
    ]
    assert {"variant=[qwen3,megatron]", f"recipe.out={tmp_path}/out", f"recipe.root={ROOT}"} < set(command)
    assert command[-1] == f"{LR}7"
    assert not (tmp_path / "out").exists()
    actor = composed("gsm8k_multiturn", "qwen3", "megatron").actor_rollout_ref
    assert (actor.actor.megatron.tensor_model_parallel_size, actor.model.path) == (2, "Qwen/Qwen3-4B")
    assert not {"fsdp_config", "ulysses_sequence_parallel_size"} & (actor.actor.keys() | actor.ref.keys())


def test_a_recipe_is_composed_without_the_launcher_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m verl.trainer.main_ppo --config-path $PWD/recipes/… --config-name config` finds all that it needs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PWD", str(ROOT))
    launch = plan_run("otc", variants=["search"])
    bare = replace(launch, searched=tuple(entry.replace(f"{ROOT}/", "") for entry in launch.searched))
    monkeypatch.setattr(RunPlan, "settings", lambda self: ["variant=search"])
    config = resolved(compose_run(bare))
    assert config["recipe"]["out"] == f"{ROOT}/outputs/otc"
    assert config["data"]["train_files"] == f"{ROOT}/outputs/otc/data/train.parquet"
    assert config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config_path"].startswith(str(ROOT))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "qwen9"], "verl-multiturn: unknown variant 'qwen9'; did you mean 'qwen3'? known are "),
        (["variant=[qwen3,qwen9]"], "verl-multiturn: unknown variant 'qwen9'; did you mean 'qwen3'? known are "),
        (["--variant"], "Option '--variant' requires an argument"),
        (["--smok"], "No such option: --smok"),
        (["trainer.nnodes"], "unknown argument 'trainer.nnodes'; an override has the form key=value"),
        (
            ["trainer.nnods=2"],
            "unknown key 'trainer.nnods'; did you mean 'nnodes'? a key that is really new takes a plus",
        ),
        (["actor_rollout_ref.rollot.n=2"], "unknown key 'actor_rollout_ref.rollot'; did you mean 'rollout'? a key"),
        (
            ["model.trust_remote_code=true"],
            "unknown key 'model.trust_remote_code'; did you mean 'actor_rollout_ref.model.trust_remote_code' or",
        ),
        (["multi_turn.format=hermes"], "did you mean 'actor_rollout_ref.rollout.multi_turn.format'"),
        (["custom.multiturn.filter=skip"], "unknown key 'custom.multiturn.filter'; did you mean 'mt.filter'?"),
        ([f"{PATH}.fliter=skip"], f"{PATH}.fliter: unknown setting; did you mean 'filter'?"),
        (["mt.fliter=skip"], f"{PATH}.fliter: unknown setting; did you mean 'filter'?"),
        (["mt.context.mod=skip"], f"{PATH}.context.mod: unknown setting; did you mean 'mode'?"),
        (
            ["mt.context.mode=skip"],
            f"{PATH}.context.mode: Input should be 'append', 'window' or 'overflow', got 'skip'",
        ),
        (["mt=skip"], "multiturn: expected a mapping, got 'skip'"),
        (["trainer.nnods=2", "trainer.n_gpu_per_node=1"], "unknown key 'trainer.nnods'; did you mean 'nnodes'? a key"),
        ([f"{PATH[:-9]}multitrun.filter=skip"], "multitrun'; did you mean 'multiturn'? a key that is really new takes"),
        (["offload@actor_rollout_ref.critic=dp_actor"], "Could not override 'offload@actor_rollout_ref.critic'"),
        (["trainer.project_name.x=1"], "Could not override 'trainer.project_name.x'"),
        (["smoke=gpu"], "'smoke=gpu': the smoke run is on a CPU; expected smoke=cpu, or --smoke"),
        (["--out", "."], "--out '.': expected a folder for this run alone, which the current one is not"),
        (["--out", "blank "], "cannot be used, since Hydra reads only letters of ASCII"),
        (
            ["--smoke", "--data", "mine.jsonl"],
            "--data 'mine.jsonl' cannot be used with --smoke, which makes its own data",
        ),
        (["--out", "lr=1e-6"], "cannot be used, since Hydra reads only letters of ASCII"),
        (["--out", "größe"], "cannot be used, since Hydra reads only letters of ASCII"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    place = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    ran = run_here(_COMMAND, *place, *words, COLUMNS="200")
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert ran.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_hydras_ways_to_override_are_taken(tmp_path: Path) -> None:
    words = ["trainer.nnodes=2", "+a.b=1", "++a.c={x: 1}", "~trainer.project_name", "hydra.job.name=x"]
    ran = run_here(_COMMAND, "--print", "--steps", "3", "--seed", "5", "--out", str(tmp_path), *words)
    assert ran.exit_code == 0, ran.stderr
    command = words_of(ran.stdout)
    assert command[-5:] == words
    assert {"trainer.total_training_steps=3", "seed=given", "recipe.seed=5"} < set(command)


def test_a_seed_is_the_runs(tmp_path: Path) -> None:
    for recipe in ("gsm8k_multiturn", "quickstart", "smollm2"):
        config = composed(recipe, seed=5)
        rollout = config.actor_rollout_ref.rollout
        assert config.data.seed == config.actor_rollout_ref.actor.data_loader_seed == 5
        assert rollout.engine_kwargs.sglang.random_seed == 5
    assert prepare_words(config.recipe) == ["--seed", "5"]


def test_options_for_the_rows_come_from_several_files() -> None:
    config = compose_run(plan_run("torl", variants=["zerotir"], smoke=True))
    assert prepare_words(resolved(config)["recipe"]) == [
        *("--source", "Open-Reasoner-Zero/orz_math_57k_collection"),
        *("--validation", "Maxwell-Jia/AIME_2024", "yentinglin/aime_2025", "--prompt", "chat"),
    ]
    assert prepare_words({"prepare": {"no-tool": True, "most": 3, "source": None, "x": False}}) == [
        *("--no-tool", "--most", "3"),
    ]


def test_the_baseline_of_a_smoke_run_has_no_tool() -> None:
    plain, baseline = composed("image_zoom", smoke=True), composed("image_zoom", "no_tool", smoke=True)
    assert baseline.actor_rollout_ref.rollout.multi_turn.tool_config_path is None
    assert plain.actor_rollout_ref.rollout.multi_turn.tool_config_path.endswith("/data/tools.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "start it on each node with NODE_RANK"),
        (["--variant", "ppo"], "unknown variant 'ppo'; known are qwen2.5_7b"),
        (["++trainer.nnodes=two"], "trainer.nnodes=two: expected a number"),
    ],
)
def test_the_cold_start_refuses_what_cannot_work(words: list[str], said: str, tmp_path: Path) -> None:
    ran = run_here(f"bash {RECIPES}/retool/sft.sh", "--out", str(tmp_path), *words, NODE_RANK="")
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_data_is_prepared_once_and_anew_when_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) + "\n" for i in range(40)))
    words = ["--prepare", "--out", str(tmp_path / "out")]
    assert run_here(_COMMAND, *words, "--data", str(source)).exit_code == 0
    train = tmp_path / "out" / "data" / "train.parquet"
    first = train.stat().st_mtime_ns
    assert run_here(_COMMAND, *words).exit_code == 0
    assert train.stat().st_mtime_ns == first
    assert run_here(_COMMAND, *words, "--data", str(source)).exit_code == 0
    second = train.stat().st_mtime_ns
    assert second != first
    # Without the tool other rows are needed, which the hub does not give here: the old ones are not taken for them.
    offline = run_here(_COMMAND, *words, "--variant", "no_tool", HF_HUB_OFFLINE="1")
    assert offline.exit_code != 0
    assert "'openai/gsm8k' is no local file" in capfd.readouterr().err
    # The user's own rows are used unchanged.
    (train.parent / ".preparing").unlink()  # files of the failed script
    assert run_here(_COMMAND, *words, "--variant", "no_tool").exit_code == 0
    assert train.stat().st_mtime_ns == second


def test_preparing_leaves_an_earlier_runs_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert run_here(_COMMAND, "--smoke", "--prepare", "--out", str(tmp_path)).exit_code == 0
    assert (tmp_path / "data" / "train.parquet").is_file()
    assert (tmp_path / "metrics.jsonl").is_file()


def test_rows_without_an_answer_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text(json.dumps({"question": "2+2?", "answer": "four"}) + "\n" + json.dumps({}))
    ran = run_here(_COMMAND, "--prepare", "--out", str(tmp_path / "out"), "--data", str(source))
    assert ran.exit_code != 0
    assert "expected a `question`, and an `answer` that ends in `#### 42`" in capfd.readouterr().err


def test_every_recipe_says_what_it_is() -> None:
    recipes = list_recipes()
    assert recipes.keys() >= {"gsm8k_multiturn", "torl", "retool", "search_r1", "text2sql", "tool_n1", "mixed", "otc"}
    assert all(recipes.values())


def test_a_copied_recipe_is_the_same(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "copy", "otc", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    printed = run_here(f"bash {tmp_path}/recipes/otc/run.sh", "--smoke", "--print").stdout
    ours = run_here(f"bash {RECIPES}/otc/run.sh", "--smoke", "--print").stdout
    ours = re.sub(r"metrics\.\d+\.jsonl", "metrics.jsonl", ours)  # a run may have its own in our outputs
    assert printed == ours.replace(f"{ROOT}/recipes", f"{tmp_path}/recipes").replace(
        f"{ROOT}/outputs", f"{tmp_path}/outputs"
    ).replace(f"recipe.root={ROOT}", f"recipe.root={tmp_path}").replace(f"PYTHONPATH={ROOT}", f"PYTHONPATH={tmp_path}")
    copied = plan_run(str(tmp_path / "recipes" / "otc"), smoke=True)
    config = resolved(compose_run(copied))
    assert Path(config["actor_rollout_ref"]["model"]["path"]) == tmp_path / "recipes" / "common" / "model"
    assert (tmp_path / "recipes" / "common" / "model" / "config.json").is_file()
    assert config["recipe"]["prepare_data"] == str(tmp_path / "recipes" / "torl" / "prepare_data.py")
    # Only files that it names come with it.
    assert {path.name for path in (tmp_path / "recipes").iterdir()} == {"common", "otc", "search_r1", "torl"}
    assert {path.name for path in (tmp_path / "tool_configs").iterdir()} == {"retrieval.yaml"}
    assert not (tmp_path / "recipes" / "common" / "skeleton").exists()
    # The user's changes stay.
    (tmp_path / "tool_configs" / "gsm8k.yaml").write_text("mine")
    # Of a recipe of which a part is there the other part is copied.
    (tmp_path / "recipes" / "otc" / "config.yaml").unlink()
    (tmp_path / "recipes" / "otc" / "README.md").write_text("mine")
    for name in ("otc", "gsm8k_multiturn"):
        again = CliRunner().invoke(app, ["recipe", "copy", name, str(tmp_path)])
        assert again.exit_code == 0, again.output
    assert (tmp_path / "recipes" / "otc" / "config.yaml").is_file()
    assert (tmp_path / "recipes" / "otc" / "README.md").read_text() == "mine"
    assert (tmp_path / "tool_configs" / "gsm8k.yaml").read_text() == "mine"
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(app, ["recipe", "copy", "otc", str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert "cannot copy the recipes into" in refused.output
    # A path is not taken for a name.
    assert plan_run(f"{tmp_path}/recipes/otc").folder == tmp_path / "recipes" / "otc"
    with pytest.raises(ConfigError, match=r"unknown recipe './otc'"):
        plan_run("./otc")


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "copy", "gsm9k", str(tmp_path)])
    assert ran.exit_code == 2
    assert "unknown recipe 'gsm9k'; known are " in ran.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in RECIPES.glob("*/run.sh")))
def test_every_recipe_has_its_settings_beside_the_originals(recipe: str) -> None:
    text = (RECIPES / recipe / "README.md").read_text(encoding="utf-8")
    own = ("smollm2", "quickstart", "ask_first", "errands", "frozen_lake", "proxy_quickstart", "repair", "from_records")
    own += ("tictactoe", "closed_loop")
    if recipe in own:
        assert "There is no original" in text or recipe == "quickstart"
        return
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| setting | original"))
    assert re.fullmatch(r"\| setting \| original[^|]* \| ours \| why \|", lines[start])
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    rows = [re.sub(r"`[^`]*`", "", line).split("|") for line in table]
    assert {len(cells) for cells in rows} == {6}, rows
    assert {"steps", "checkpoints"} <= {word for cells in rows for word in re.findall(r"\w+", cells[1])}


@pytest.mark.stack  # verl's own configuration files are composed, for each recipe
@pytest.mark.parametrize(
    "recipe",
    sorted(
        {path.parent.name for path in RECIPES.glob("*/run.sh")}
        - {"quickstart", "proxy_quickstart", "from_records", "closed_loop"}
    ),
)
def test_a_run_neither_loses_its_model_nor_fills_the_disk(recipe: str) -> None:
    config = composed(recipe)
    assert config.trainer.save_freq > 0
    for model in ("actor", "critic"):
        assert 1 <= config.trainer[f"max_{model}_ckpt_to_keep"] <= 3
    assert config.trainer.log_val_generations > 0
    assert config.trainer.validation_data_dir.endswith(f"outputs/{recipe}/validation")
    assert config.data.filter_overlong_prompts_workers > 1


SLEEPER = """
import signal, subprocess, sys, time
from pathlib import Path
from typing import Any
from verl_multiturn.runs.processes import run_watched

# Set in both cases: the tests themselves may run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "nohup" else signal.SIG_DFL)
program = f'''
import os, subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
while not os.path.exists({sys.argv[1] + ".end"!r}):
    time.sleep(0.05)
'''


def watch(runs):
    while runs():
        time.sleep(0.1)


run_watched([sys.executable, "-c", program], {}, Path(sys.argv[1]), watch)
"""


@pytest.mark.parametrize(("how", "status"), [("", 1), ("nohup", 0)])
def test_a_closed_terminal_ends_what_was_started_unless_told_otherwise(tmp_path: Path, how: str, status: int) -> None:
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", SLEEPER, str(log), how], stderr=subprocess.DEVNULL) as launcher:
        while not (log.is_file() and log.read_text().endswith("\n")):
            time.sleep(0.05)
        launcher.send_signal(signal.SIGHUP)
        if how == "nohup":
            (tmp_path / "log.end").touch()  # else nothing but the signal ends it
        assert (launcher.wait(550) != 0) == bool(status)
    grandchild = int(log.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert has_ended(psutil.Process(grandchild))


def test_a_mode_that_a_recipe_does_not_find_is_refused() -> None:
    """Hydra would take `+mode=…` for a new key, and the run would go on in the recipe's own mode."""
    for mode in ("sync", "colocate_async", "separate_async"):
        assert f"+mode={mode}" in plan_run("quickstart", mode=mode).settings()
        with pytest.raises(ConfigError, match=rf"--mode {mode}: .*config\.yaml' does not find mode/{mode}\.yaml"):
            plan_run("retool/sft", mode=mode)
