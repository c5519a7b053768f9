"""The files of a model are files of its folder, and name nothing elsewhere."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.hash import INDEX, WEIGHTS, weight_files
from verl_multiturn.models.location import find_model
from verl_multiturn.trust import files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / WEIGHTS).touch()
    return folder


def test_a_plain_model(model: Path) -> None:
    assert find_model(model).folder == model


@pytest.mark.parametrize("place", ["config.json", WEIGHTS, "tokenizer.json", "more/x", "more"])
def test_links_that_lead_out_are_refused(model: Path, tmp_path: Path, place: str) -> None:
    path, target = model / place, tmp_path / "private"
    if path.is_dir():
        path.rmdir()
        target.mkdir()
    else:
        path.unlink(missing_ok=True)
        target.write_text("{}")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=rf"{place}' is a link that leads out of the folder, to '.*private'; put a"):
        find_model(model)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for name in ("config.json", WEIGHTS):
        (tmp_path / "models--a--b" / "blobs" / name).write_text("{}")
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / name)
    assert find_model(snapshot).folder == snapshot
    (tmp_path / "private").write_text("")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="leads out of the folder"):
        find_model(snapshot)


def test_what_is_no_file_is_refused(model: Path) -> None:
    os.mkfifo(model / "more" / "pipe")
    with pytest.raises(ConfigError, match=r"more/pipe' is no file, but a pipe, a socket or a device; remove it"):
        find_model(model)
    (model / "more" / "pipe").unlink()
    (model / "more" / "gone").symlink_to("nothing")
    (model / "more" / "circle").symlink_to("circle")
    for name in ("gone", "circle"):
        with pytest.raises(ConfigError, match=r"more/\w+' is a link that leads nowhere; remove it"):
            find_model(model)
        (model / "more" / name).unlink(missing_ok=True)
        (model / "more" / "circle").unlink(missing_ok=True)
        (model / "more" / "circle").symlink_to("circle")
    (model / "more" / "circle").unlink()
    with (model / "tokenizer.json").open("wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(ConfigError, match=r"tokenizer\.json' has 6,442 MB, and a file beside the weights at most 67"):
        find_model(model)


def test_a_folder_of_very_many_files_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_ENTRIES", 2)
    with pytest.raises(ConfigError, match="has more than 2 files"):
        find_model(model)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"attn_implementation": "theirs/kernel"}, "names the kernel 'theirs/kernel', which transformers would fetch"),
        ({"text_config": {"_attn_implementation": {"": "theirs/kernel:f"}}}, "names the kernel"),
        ({"layers": [{"_attn_implementation_internal": "theirs/kernel"}]}, "names the kernel"),
        ({"auto_map": {"AutoConfig": "theirs/model--a.B"}}, "names Python files of another repository"),
    ],
)
def test_a_configuration_that_fetches_is_refused(model: Path, config: dict[str, Any], match: str) -> None:
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=match):
        find_model(model)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"vocab_size": ' + "9" * 100_000 + "}", "{", "\ufeff{}"])
def test_a_configuration_that_is_no_json_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read as JSON .*; name another folder"):
        find_model(model)


def test_files_of_its_own_are_another_question(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "a.B"}, "attn_implementation": "sdpa"}))
    assert find_model(model).folder == model


def test_an_adapter_beside_a_model_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "theirs/base"}))
    with pytest.raises(ConfigError, match=r"would load the base that it names in its place; remove it"):
        find_model(model)


@pytest.mark.parametrize("name", ["../private.safetensors", "/private.safetensors", "more/x.safetensors", "", "."])
def test_an_index_names_files_of_its_own_folder(model: Path, name: str) -> None:
    (model / WEIGHTS).unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="and not a file of the folder itself; write the folder again"):
        weight_files(model)


def test_a_tokenizer_names_no_file_that_lies_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "vocab.json").write_text("{}")
    (tmp_path / "own.txt").write_text("mine")
    for name in ("/nowhere/special_tokens_map.json", "vocab.json", str(folder / "vocab.json")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"vocab_file": name}))
        files.require_plain_model(folder, folder, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"init": {"vocab_file": str(tmp_path / "own.txt")}}))
    with pytest.raises(ConfigError, match="lies elsewhere"):
        files.require_plain_model(folder, folder, folder)
