"""The command line as a whole: one rule for the exit statuses of all subcommands."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.tools import broken_tools
from verl_multiturn.cli import main as cli
from verl_multiturn.config import check_place
from verl_multiturn.observe.doctor import Finding

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
    monkeypatch.setattr(cli, "examine_environment", lambda gpu: [Finding("disk", False, "full")])
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
