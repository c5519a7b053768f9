"""The weights that an evaluation asks: a folder as it is, a checkpoint exported once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from verl_multiturn.errors import ConfigError
from verl_multiturn.models import card, export
from verl_multiturn.models.evaluation_model import evaluated, names_of, rows_of_run
from verl_multiturn.models.location import Model

FOLDER = ROOT / "recipes" / "quickstart" / "model"


def quiet(text: str) -> None:
    """Take a line of progress."""


def run_of(folder: Path, rows: Path) -> Path:
    """Make the folder of a run that validated a file of rows."""
    place = folder / "hydra" / ".hydra"
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(json.dumps({"data": {"val_files": str(rows)}}))
    return folder


def checkpoint(folder: Path, step: int = 20) -> Model:
    return Model(folder, 1, folder / "huggingface", None, step)


def test_a_folder_of_hugging_face_is_evaluated_as_it_is(tmp_path: Path) -> None:
    found = evaluated("model", Model(FOLDER, 0, FOLDER), tmp_path, quiet)
    assert (found.named, found.folder, found.weights, found.origin) == ("model", FOLDER, "24e099fa9bfa4ac5", {})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_exported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []

    def write(model: Model, to: Path, dtype: str | None, tell: Any, given: Any) -> None:
        exported.append((model.folder, to, dtype))
        to.mkdir()
        (to / "model.safetensors").write_bytes((FOLDER / "model.safetensors").read_bytes())

    monkeypatch.setattr(export, "export", write)
    monkeypatch.setattr(card, "run_file_of", lambda model: {"schemas": []})
    out = tmp_path / "out"
    for _ in range(2):
        found = evaluated("run", checkpoint(tmp_path / "actor"), out, quiet)
        assert (found.folder, found.weights, found.origin) == (out / "model", "24e099fa9bfa4ac5", {"schemas": []})
    assert exported == [(tmp_path / "actor", out / "model", None)]
    with pytest.raises(ConfigError, match=r"holds the export of .*'step': 20.*, and not of .*'step': 10"):
        evaluated("run", checkpoint(tmp_path / "actor", 10), out, quiet)


def test_a_run_has_rows_as_long_as_their_file_is_there(tmp_path: Path) -> None:
    rows = tmp_path / "test.parquet"
    model = Model(tmp_path, 1, tmp_path, run_of(tmp_path / "run", rows), 20)
    assert rows_of_run(model) is None
    rows.touch()
    assert rows_of_run(model) == (rows,)
    assert rows_of_run(Model(tmp_path, 0, tmp_path)) is None


def test_folders_of_several_models_have_different_names() -> None:
    models = [
        Model(Path("runs/a/checkpoints/global_step_20/actor"), 1, Path(), Path("runs/a"), 20),
        Model(Path("x/model"), 0, Path()),
        Model(Path("y/model"), 0, Path()),
    ]
    assert names_of(models) == ["a-20", "model", "model-2"]
