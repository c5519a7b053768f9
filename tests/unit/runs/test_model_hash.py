"""The hash of a model's weights depends on the tensors alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.hash import INDEX, model_hash

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1, 2], np.int64), "c": np.zeros(0)}


def write(folder: Path, *files: dict[str, np.ndarray]) -> Path:
    """Write a folder of weights, with an index where there are several files."""
    folder.mkdir()
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"part-{number}.safetensors" for number in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def test_the_files_do_not_count(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", TENSORS)
    split = write(tmp_path / "split", {"c": TENSORS["c"], "b": TENSORS["b"]}, {"a": TENSORS["a"]})
    assert model_hash(whole) == model_hash(split) == "30e5457de260d3e1"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("b", TENSORS["b"].reshape(3, 2)),
        ("b", TENSORS["b"] + 1),
        ("b", TENSORS["b"].view(np.int32)),
        ("d", TENSORS["b"]),
    ],
    ids=["shape", "bytes", "dtype", "name"],
)
def test_everything_of_a_tensor_counts(tmp_path: Path, name: str, other: np.ndarray) -> None:
    changed = {key: value for key, value in TENSORS.items() if key != "b"} | {name: other}
    assert model_hash(write(tmp_path / "other", changed)) != model_hash(write(tmp_path / "whole", TENSORS))


def test_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json; name"):
        model_hash(tmp_path)
    whole = write(tmp_path / "whole", TENSORS)
    content = (whole / "model.safetensors").read_bytes()
    for damaged in (b"", content[:20], content[:-1], b"\xff" * 8 + content[8:]):
        (whole / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model\.safetensors' is no whole file of safetensors"):
            model_hash(whole)


def test_a_missing_part_and_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    split = write(tmp_path / "split", {"b": TENSORS["b"]}, {"a": TENSORS["a"]})
    save_file(TENSORS, split / "model.safetensors")
    with pytest.raises(ConfigError, match="that does not name it; remove one of them"):
        model_hash(split)
    (split / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 'part-1\.safetensors', which model\.safetensors\.index\.json names"):
        model_hash(split)
    (split / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match="is no index of weights"):
        model_hash(split)
