"""A wrong value of an option ends its command with status 2 and a sentence, and with no traceback."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli import main as cli

pytestmark = pytest.mark.slow

TOOLS = str(ROOT / "tool_configs" / "calculator.yaml")
USER = "verl_multiturn.interactions.scripted_user.ScriptedUser"
DEEP = "[" * 100_000 + "]" * 100_000
EVAL = ["eval", "model", "--recipe", "quickstart"]
RUN = ["run", "quickstart", "--print"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x\n")
    Path("deep.json").write_text(DEEP)
    Path("deep.yaml").write_text(DEEP[95_000:105_000])
    os.mkfifo("pipe.yaml")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*RUN, "--seed", "-1"], "--seed -1: expected a seed from 0 to 2147483647"),
        ([*RUN, "--seed", "2147483648"], "--seed 2147483648: expected a seed from 0 to 2147483647"),
        ([*RUN, "recipe.seed=-1"], "recipe.seed=-1: expected a seed from 0 to 2147483647"),
        (
            [*RUN, "--mode", "sync", "trainer.v1.trainer_mode=colocate_async"],
            "--mode 'sync' and 'trainer.v1.trainer_mode=colocate_async' contradict each other; leave one of them out",
        ),
        (
            [*RUN, "--mode", "sync", "++trainer.v1.trainer_mode='separate_async'"],
            "--mode 'sync' and \"++trainer.v1.trainer_mode='separate_async'\" contradict each other",
        ),
        (
            [*RUN, "--steps", "3", "trainer.total_training_steps=5"],
            "--steps 3 and 'trainer.total_training_steps=5' contradict each other",
        ),
        ([*RUN, "--seed", "3", "recipe.seed=4"], "--seed 3 and 'recipe.seed=4' contradict each other"),
        ([*RUN, "--out", "one", "recipe.out=two"], "and 'recipe.out=two' contradict each other"),
        ([*RUN, "--out", "file"], "--out 'file' is no folder; name a new one, or the folder of an earlier run"),
        ([*RUN, "--out", "file/run"], "--out 'file/run': 'file' is no folder; name a new one"),
        ([*RUN, "recipe.out=file"], "recipe.out='file' is no folder; name a new one"),
        ([*RUN, "recipe.out="], "recipe.out is empty"),
        ([*RUN, "~trainer"], "the configuration has no section 'trainer'; leave it in"),
        ([*RUN, "trainer.total_training_steps=-3"], "trainer.total_training_steps=-3: expected a number of steps"),
        ([*RUN, "trainer.total_training_steps=1.5"], "trainer.total_training_steps=1.5: expected a number of steps"),
        (["validate", "deep.yaml"], "'deep.yaml' is no valid YAML: it is nested too deeply"),
        (["validate", "--interactions", "deep.yaml"], "'deep.yaml' is no valid YAML: it is nested too deeply"),
        (["check-tool", TOOLS, "--config", DEEP], "is no JSON (it is nested too deeply)"),
        (["check-tool", TOOLS, "--timeout-s", "inf"], "less than or equal to"),
        (["check-interaction", USER, "--timeout-s", "inf"], "less than or equal to"),
        (["check-interaction", USER, "--actions", "pipe.yaml"], "'pipe.yaml' is no file"),
        ([*EVAL, "--engine", "http://me:secret@host/v1"], "--engine: expected an address without a user, a password"),
        (["serve", "--script", "pipe.yaml", "--", "true"], "--script 'pipe.yaml' is no file; name a text file"),
        (["serve", "--row", "pipe.yaml", "--", "true"], "--row 'pipe.yaml' is no file; name a file with a JSON object"),
        (["serve", "--row", "deep.json", "--", "true"], "--row 'deep.json' cannot be read (it is nested too deeply)"),
    ],
)
def test_a_wrong_value_is_refused(command: list[str], said: str) -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, command)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split()).replace("│", "")
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["--mode", "sync", "trainer.v1.trainer_mode=sync"],
        ["--steps", "5", "trainer.total_training_steps=5"],
        ["--seed", "0"],
        ["--seed", "3", "data.seed=4"],  # one of several keys that --seed sets: the others stay
        ["--out", "new/run"],
    ],
)
def test_what_agrees_is_accepted(words: list[str]) -> None:
    done = CliRunner().invoke(cli.app, [*RUN, *words])
    assert done.exit_code == 0, done.output
