"""A run's files about its model: its card, its tools and its sampling."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl_multiturn.models.card import write_card
from verl_multiturn.models.export_result import ExportReport
from verl_multiturn.models.location import Model
from verl_multiturn.trust import rule

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
RECORDED = {"schema": 2, "start": "1", "began": 1.0, "host": "h", "versions": {}, "settings": {}}
METRICS = [
    {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.25}},
    {"step": 1, "data": {"critic/score/mean": 0.5, "rollout/certificate/rows": 8, "rollout/certificate/tokens": 1000}},
    {"step": 2, "data": {"critic/score/mean": 0.7, "rollout/certificate/rows": 8, "val-core/sums/acc/mean@1": 0.5}},
    {"step": 3, "data": {"critic/score/mean": 1.0, "rollout/certificate/rows": 99}},
]


def exported(folder: Path) -> ExportReport:
    return ExportReport(folder, "00ff", "float32", 2, 1234, 10, None, 1.5e-6, 1e-4, None, 9.87, "aa00", [])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "hydra" / ".hydra").mkdir(parents=True)
    tools = str(ROOT / "tool_configs" / "calculator.yaml")
    (run / "hydra" / ".hydra" / "config.yaml").write_text(CONFIG.replace("OUT", str(run)).replace("TOOLS", tools))
    (run / "train.parquet").write_bytes(b"rows")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in METRICS))
    return run


def write(folder: Path, model: Model, tools: Path | None = None) -> list[str]:
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 600}')
    (folder / "generation_config.json").write_text(
        '{"_from_model_config": true, "eos_token_id": 5, "temperature": 0.6, "top_k": 20}'
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return write_card(model, folder, "sums-2", exported(folder), print, tools)


def test_the_files_of_a_run(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "model"
    written = write(folder, Model(run, 1, run, run, 2), ROOT / "tool_configs" / "calculator.yaml")
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
        "| weights | `00ff` (`models/hash.py`), 1,234 parameters, float32 |",
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
    assert write_card(Model(folder, 0, folder), folder, "x", exported(folder), print) == ["README.md"]
    again = "Written again by `verl-multiturn export`: weights `00ff`, float32.\n"
    assert (folder / "README.md").read_text() == f"mine\n\n{again}"


def test_tools_without_a_record_are_told(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tools.json" not in write(tmp_path / "model", Model(run, 1, run, run, 2))
    assert "tools.json is not written: the run has no records with" in capsys.readouterr().out


def test_the_tools_of_the_records_are_data(tmp_path: Path, run: Path) -> None:
    schema = {"type": "function", "function": {"name": "recorded", "parameters": {}}}
    (run / "records").mkdir()
    (run / "records" / "run-1.json").write_text(json.dumps(RECORDED | {"schemas": [schema]}))
    assert "tools.json" in write(tmp_path / "model", Model(run, 1, run, run, 2))
    assert json.loads((tmp_path / "model" / "tools.json").read_text()) == [schema]


HOSTILE = "x\n---\nlicense: mit\n---\n</details><script>a</script>`|[a](http://b) ![c](d)\u202e\x1b[0m"


def test_texts_of_a_run_stay_texts(tmp_path: Path, run: Path) -> None:
    config = {
        "recipe": {"name": HOSTILE},
        "data": {"seed": HOSTILE, "train_files": HOSTILE},
        "actor_rollout_ref": {"model": {"path": HOSTILE}, "rollout": {"multi_turn": {"format": HOSTILE}}},
    }
    (run / "hydra" / ".hydra" / "config.yaml").write_text(json.dumps(config))
    name = f"val-core/{HOSTILE.replace(chr(10), ' ')}/acc/mean@1"
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {name: 1.0, "critic/score/mean": "x"}}))
    (run / "records").mkdir()
    schema = {"type": "function", "function": {"name": HOSTILE, "parameters": {}}}
    told = RECORDED | {"schemas": [schema], "versions": {HOSTILE: HOSTILE}}
    (run / "records" / "run-1.json").write_text(json.dumps(told))
    write(tmp_path / "model", Model(run, 1, run, run, 2))
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.splitlines()[:4] == [
        "---", "library_name: transformers", "tags: [verl, reinforcement-learning, tool-use]", "---",
    ]  # fmt: skip
    assert card.splitlines().count("---") == 2
    assert "license: mit" in card
    for forbidden in ("<script", "</details", "\nlicense", "[a](", "\u202e", "\x1b"):
        assert forbidden not in card


def test_a_path_out_of_a_strangers_folder_is_not_read(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "train.parquet").rename(tmp_path / "private")
    (run / "train.parquet").symlink_to(tmp_path / "private")
    write(tmp_path / "model", Model(run, 1, run, run, 2))
    assert (
        "| train: train.parquet | `not at hand when this was written` |"
        in (tmp_path / "model" / "README.md").read_text()
    )
    (run / "metrics.jsonl").rename(tmp_path / "private.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "private.jsonl")
    write(tmp_path / "other", Model(run, 1, run, run, 2))
    assert "## Curve" not in (tmp_path / "other" / "README.md").read_text()
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path)
    write(tmp_path / "own", Model(run, 1, run, run, 2))
    card = (tmp_path / "own" / "README.md").read_text()
    assert "| train: train.parquet | `f2305e3ea413d261c40604673f9fbe7d` |" in card
