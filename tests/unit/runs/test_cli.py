"""The command line as a whole: one rule for the exit statuses of all subcommands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import verl_multiturn
from tests.conftest import ROOT
from tests.unit.tools import broken_tools
from verl_multiturn.cli import main as cli
from verl_multiturn.config import check_place
from verl_multiturn.runs.doctor import DoctorFinding

TOOLS = str(ROOT / "tool_configs" / "gsm8k.yaml")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "gsm9k"],
        ["run", "gsm8k_multiturn", "--print", "trainer.nnods=2"],
        ["run", "gsm8k_multiturn", "--stpes", "2"],
        ["recipe", "copy", "gsm9k", "mine"],
        ["validate", "gone.yaml"],
        ["validate", TOOLS, "--dataset", "gone.parquet"],
        ["check-tool", "nowhere.Tool"],
        ["check-tool", TOOLS, "--arguments", "{"],
        ["verify", "gone.jsonl"],
        ["doctr"],
        ["check-tool", TOOLS, "--dataset", "gone.parquet"],
        ["run", "quickstart", "--print", "--check"],
    ],
)
def test_what_cannot_be_done_ends_with_2(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2, done.output
    assert list(tmp_path.iterdir()) == []


def test_what_was_tried_and_failed_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    assert runner.invoke(cli.app, ["check-tool", f"{broken_tools.__name__}.Raises"]).exit_code == 1
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "?"}], "extra_info": {"tools_kwargs": 3}}))
    assert runner.invoke(cli.app, ["validate", TOOLS, "--dataset", str(rows)]).exit_code == 1
    monkeypatch.setattr(
        "verl_multiturn.cli.doctor.examine_environment", lambda gpu: [DoctorFinding("disk", False, "full")]
    )
    assert runner.invoke(cli.app, ["doctor"]).exit_code == 1
    monkeypatch.setattr("verl_multiturn.cli.run.run_recipe", lambda plan, **options: 1)
    assert runner.invoke(cli.app, ["run", "gsm8k_multiturn"]).exit_code == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("+{}.tool_timeout=3", "tool_timeout: unknown setting; did you mean 'tool_timeout_s'?"),
        ("+{}.certificate_share=2", "certificate_share: Input should be less than or equal to 1, got 2"),
        ("+{}=3", "expected a mapping, got 3"),
        ("+custom.multiturn.tool_timeout_s=3", "custom.multiturn: nothing reads these settings here; write actor_"),
        ("+rollout.custom.multiturn.tool_timeout_s=3", "rollout.custom.multiturn: nothing reads these settings here"),
        ("+{}run.certificate_share=3", ".custom.multiturnrun: nothing reads these settings here; write actor_rollout"),
        ("+actor_rollout_ref.rollout.custom.Multi_Turn.proxy.agent=a", ".custom.Multi_Turn: nothing reads these"),
    ],
)
def test_our_own_settings_are_read_before_a_run(setting: str, said: str) -> None:
    word = setting.format("actor_rollout_ref.rollout.custom.multiturn")
    done = CliRunner().invoke(cli.app, ["run", "gsm8k_multiturn", "--print", word])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "section", [{"multiturn_rl": {"steps": 3}}, {"my_multiturn": 3}, {"multitrun": None}, {"multiturn": {}}, [], None]
)
def test_what_another_plugin_has_beside_our_settings_is_left_alone(section: Any) -> None:
    check_place({"actor_rollout_ref": {"rollout": {"custom": section}}, "custom": {"multi_turn": {"max_staleness": 1}}})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "quickstart"], "no command 'train'; did you mean 'run'?"),
        (["evaluate"], "no command 'evaluate'; did you mean 'eval'?"),
        (["version"], "no command 'version'; did you mean '--version'?"),
        (["doctr"], "no command 'doctr'; did you mean 'doctor'?"),
        (["qqq"], "no command 'qqq'; verl-multiturn -h lists all"),
    ],
)
def test_a_command_of_others_names_ours(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_the_version_is_the_packages() -> None:
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"verl-multiturn {verl_multiturn.__version__}\n")
    assert f'version="{verl_multiturn.__version__}"' in (ROOT / "setup.py").read_text()


def test_a_shell_completes_commands_and_recipes() -> None:
    def completed(words: str) -> list[str]:
        given = {**os.environ, "_VERL_MULTITURN_COMPLETE": "complete_bash", "COMP_WORDS": words}
        given["COMP_CWORD"] = str(len(words.split(" ")) - 1)
        script = "from verl_multiturn.cli.main import app; app(prog_name='verl-multiturn')"
        done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True)
        return done.stdout.split()

    assert completed("verl-multiturn ev") == ["eval"]
    assert completed("verl-multiturn run quick") == ["quickstart"]
    assert completed("verl-multiturn recipe copy gsm") == ["gsm8k_multiturn"]


def test_rows_with_one_fault_are_one_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    bad = [
        {"prompt": [{"role": "user", "content": "?"}], "extra_info": {"tools_kwargs": number}} for number in range(1, 9)
    ]
    other = {"prompt": [], "extra_info": {}}
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*bad, other]))
    done = CliRunner().invoke(
        cli.app, ["validate", str(ROOT / "tool_configs" / "calculator.yaml"), "--dataset", str(rows)]
    )
    assert done.exit_code == 1
    lines = [line for line in done.output.splitlines() if "rows.jsonl" in line]
    assert [line.partition(":")[0].partition(" ")[0] for line in lines] == ["error", "error", "verl-multiturn"]
    assert "rows 0, 1, 2, 3, 4 and 3 more: " in lines[0]
    assert "row 8: 'prompt' must be a non-empty list" in lines[1]
    assert lines[-1].endswith("9 of 9 rows cannot work")


def test_the_summary_comes_last_in_a_pipe(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [], "extra_info": {}}) + "\n")
    command = [sys.executable, "-m", "verl_multiturn.cli", "validate", TOOLS, "--dataset", str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("1 of 1 rows cannot work")


@pytest.mark.parametrize("command", ["show", "explain", "convert --parquet", "view"])
def test_the_folder_of_a_run_that_failed_says_where(command: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("x: ray init kwargs: {}\nTraceback (most recent call last):\nRuntimeError: no raylet\n")
    name, *options = command.split()
    done = CliRunner().invoke(cli.app, [name, str(tmp_path), *options])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    ended = "the run ended while starting Ray (RuntimeError: no raylet)"
    assert f"holds no records of conversations: {ended}; whole log: {log}" in said


def test_a_row_without_a_loop_is_found_in_each_kind_of_file(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "x", "reward_model": {"ground_truth": "1"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(each) + "\n" for each in ({**row, "agent_name": "multiturn_agent"}, row)))
    calculator = str(ROOT / "tool_configs" / "calculator.yaml")
    done = CliRunner().invoke(cli.app, ["validate", calculator, "--dataset", str(rows)])
    assert done.exit_code == 1
    assert "row 1: agent_name=None names no agent loop" in " ".join(done.output.split())


def test_a_recipe_of_ones_own_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli.app, ["recipe", "new", "my_task"]).exit_code == 0
    done = CliRunner().invoke(cli.app, ["run", "my_task", "--print"])
    assert done.exit_code == 2
    assert "did you mean 'recipes/my_task'?" in " ".join(done.output.split())
