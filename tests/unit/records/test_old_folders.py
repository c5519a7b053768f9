"""Folders of schema 2 whose settings have the state of the start-up check where it was before `derived`.

`tests/support/run_before_derived` is part of a run of the quickstart by the last version that wrote so: a group of four
conversations, with the places on its machine renamed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app
from verl_multiturn.config import DerivedSettings, read_settings, with_derived
from verl_multiturn.errors import ConfigError
from verl_multiturn.records.read.records import Records
from verl_multiturn.trust.settings import read_settings as read_settings_of_folder

FOLDER = ROOT / "tests" / "support" / "run_before_derived"
START = "20261129T130114_4ea8e0"
DERIVED = DerivedSettings(
    record_start=START,
    own_server=True,
    tool_config_path="/home/me/verl-multiturn/tool_configs/calculator.yaml",
)


def ours(config: Any) -> Any:
    return config["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]


def test_the_fixture_has_the_old_keys() -> None:
    (path,) = (FOLDER / "records").glob("run-*.json")
    assert ours(json.loads(path.read_text())["settings"]).keys() & DerivedSettings.model_fields.keys() == {
        "record_start",
        "own_server",
        "tool_config_path",
    }


def test_the_settings_of_an_old_folder_have_today_s_form() -> None:
    records = Records(FOLDER)
    (run,) = records.runs
    settings = read_settings(ours(run["settings"]))
    assert settings.derived == DERIVED
    assert (settings.near_rewards, settings.prefix_tree) == ("all", "auto")
    assert read_settings(ours(read_settings_of_folder(FOLDER))) == settings
    assert len(list(records.records())) == 4
    assert [fault for fault in records.faults if "no joins" not in fault] == []


@pytest.mark.parametrize("command", ["verify", "show", "explain"])
def test_commands_read_an_old_folder(command: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "run")
    done = CliRunner().invoke(app, [command, str(folder)])
    assert done.exit_code == 0, done.output
    if command == "verify":
        assert json.loads(done.stdout.splitlines()[-1]) | {"sampled_tokens": 0} == {
            "records": 4, "sampled_tokens": 0, "violations": 0, "torn": 0, "damaged": 0, "repeated": 0
        }  # fmt: skip


@pytest.mark.parametrize("written", [None, "x", [1], {"own_server": False}])
def test_what_is_written_under_derived_counts_if_it_is_a_mapping(written: Any) -> None:
    config = {"actor_rollout_ref": {"rollout": {"custom": {"multiturn": {"own_server": True, "derived": written}}}}}
    expected = {"own_server": not isinstance(written, dict)}
    assert ours(with_derived(config)) == {"derived": expected}
    assert with_derived({"actor_rollout_ref": {"rollout": None}}) == {"actor_rollout_ref": {"rollout": None}}


WRITE_INSTEAD = {
    "record_start": "leave it out",
    "own_server": "actor_rollout_ref.rollout.name .* set that to sglang_async",
    "tool_config_path": "write it as actor_rollout_ref.rollout.multi_turn.tool_config_path",
}


@pytest.mark.parametrize("name", DerivedSettings.model_fields)
def test_a_user_does_not_set_this_state(name: str) -> None:
    with pytest.raises(ConfigError, match=f"multiturn.{name}='x': .*{WRITE_INSTEAD[name]}"):
        read_settings({name: "x"})
