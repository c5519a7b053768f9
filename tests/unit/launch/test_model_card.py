"""What a run tells about its model: its card, its tools and its sampling."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl_multiturn.launch.exported import Exported
from verl_multiturn.launch.model_card import write_card
from verl_multiturn.launch.models import Model

CONFIG = """
recipe: {name: sums, out: OUT}
data: {train_files: '${recipe.out}/train.parquet', val_files: [OUT/none.parquet], seed: 4}
trainer: {total_training_steps: 4}
actor_rollout_ref:
  model: {path: /secret/place/base, lora_rank: 0}
  rollout:
    temperature: 0.7
    top_p: 0.9
    top_k: -1
    name: sglang_async
    multi_turn: {format: hermes, tool_config_path: TOOLS}
"""
METRICS = [
    {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.25}},
    {"step": 1, "data": {"critic/score/mean": 0.5, "rollout/certificate/rows": 8, "rollout/certificate/tokens": 1000}},
    {"step": 2, "data": {"critic/score/mean": 0.7, "rollout/certificate/rows": 8, "val-core/sums/acc/mean@1": 0.5}},
    {"step": 3, "data": {"critic/score/mean": 1.0, "rollout/certificate/rows": 99}},
]


def exported(folder: Path) -> Exported:
    return Exported(folder, "00ff", "float32", 2, 1234, 10, None, 1.5e-6, 1e-4, None, 9.87, "aa00", [])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    pytest.importorskip("omegaconf")
    run = tmp_path / "run"
    (run / "hydra" / ".hydra").mkdir(parents=True)
    tools = str(ROOT / "tool_configs" / "calculator.yaml")
    (run / "hydra" / ".hydra" / "config.yaml").write_text(CONFIG.replace("OUT", str(run)).replace("TOOLS", tools))
    (run / "train.parquet").write_bytes(b"rows")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in METRICS))
    return run


def write(folder: Path, model: Model) -> list[str]:
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 600}')
    (folder / "generation_config.json").write_text(
        '{"_from_model_config": true, "eos_token_id": 5, "temperature": 0.6, "top_k": 20}'
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return write_card(model, folder, "sums-2", exported(folder), print)


def test_the_files_of_a_run(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "model"
    written = write(folder, Model(run, 1, run, run, 2))
    assert written == ["chat_template.jinja", "tools.json", "generation_config.json", "README.md"]
    (tool,) = json.loads((folder / "tools.json").read_text())
    assert (tool["type"], tool["function"]["name"]) == ("function", "calculator")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 600,
    }  # fmt: skip


def test_the_card(tmp_path: Path, run: Path) -> None:
    write(tmp_path / "model", Model(run, 1, run, run, 2))
    card = (tmp_path / "model" / "README.md").read_text()
    for line in (
        "# sums-2",
        "The model of a run of the recipe `sums` after step 2. `verl-multiturn export` wrote this page from the run's "
        "own files.",
        "| weights | `00ff` (`launch/model_hash.py`), 1,234 parameters, float32 |",
        "| base | base, weights `aa00`; this model's logits differ from its by up to 9.9 |",
        "| check | loaded again; its logits differ from the checkpoint's by at most 1.5e-06 |",
        "| certificate | 16 rows and 1,000 trained tokens verified, 0 violations |",
        "| step | reward | sums acc |",
        "| 0 | – | 0.250 |",
        "| 2 | 0.600 | 0.500 |",
        "| train: train.parquet | `f2305e3ea413d261c40604673f9fbe7d` |",
        "| val: none.parquet | `not at hand when this was written` |",
        "| data.seed | `4` |",
    ):
        assert line in card.splitlines()
    assert "| 3 |" not in card
    assert str(tmp_path) not in card
    assert "/secret" not in card


def test_a_folder_without_a_run_keeps_what_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "config.json").write_text("{}")
    assert write_card(Model(folder, 0, folder), folder, "x", exported(folder), print) == []
    assert (folder / "README.md").read_text() == "mine"


def test_tools_that_cannot_be_loaded_are_told(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run / "hydra" / ".hydra" / "config.yaml"
    (run / "tools.yaml").write_text("tools: [{class_name: nowhere.Tool}]")
    config.write_text(
        config.read_text().replace(str(ROOT / "tool_configs" / "calculator.yaml"), str(run / "tools.yaml"))
    )
    assert "tools.json" not in write(tmp_path / "model", Model(run, 1, run, run, 2))
    assert "tools.json is not written: " in capsys.readouterr().out
