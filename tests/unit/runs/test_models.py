"""A model's folder is found, or one sentence names the missing part."""

import json
import zipfile
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import find_model
from verl_multiturn.trust import rule


def make_checkpoint(step: Path, ranks: int = 1, whole: bool = True) -> Path:
    """Make the files of a checkpoint; their contents are not looked at."""
    actor = step / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    for rank in range(ranks):
        (actor / f"model_world_size_{ranks}_rank_{rank}.pt").touch()
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    if whole:
        zipfile.ZipFile(step / "data.pt", "w").close()
    return actor


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        make_checkpoint(tmp_path / "run" / "checkpoints" / f"global_step_{step}", ranks=2)
    (tmp_path / "run" / ".run.json").write_text("{}")
    return tmp_path / "run"


def test_the_newest_whole_checkpoint_of_a_run(run: Path) -> None:
    model = find_model(run)
    assert (model.step, model.ranks, model.run, model.passed_over) == (10, 2, run, "")
    assert [path.name for path in model.shards()] == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
    make_checkpoint(run / "checkpoints" / "global_step_15", whole=False)
    assert find_model(run).step == 10
    assert find_model(run).passed_over == "not whole, and passed over: global_step_15"
    assert find_model(run, 5).step == 5
    assert find_model(run / "checkpoints", 5).run == run


def test_every_way_to_name_a_checkpoint(run: Path) -> None:
    step = run / "checkpoints" / "global_step_5"
    assert find_model(step) == find_model(step / "actor") == find_model(run, 5)
    with pytest.raises(ConfigError, match=r"--step 6: .* is one checkpoint; leave --step out, or name the run"):
        find_model(step, 6)


def test_checkpoints_elsewhere_are_found_by_the_configuration_of_an_own_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "hydra" / ".hydra").mkdir(parents=True)
    text = f"place: {tmp_path}\ntrainer: {{default_local_dir: '${{place}}/elsewhere'}}\ndata: {{seed: 3}}\n"
    (run / "hydra" / ".hydra" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is a run without a checkpoint"):
        find_model(run)
    assert find_model(run, is_trusted=True).step == 10
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path)
    assert find_model(run).folder == tmp_path / "elsewhere" / "global_step_10" / "actor"


def test_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    checkpoints = run / "checkpoints"
    with pytest.raises(ConfigError, match=r"--step 6: .* has no such checkpoint; there are 5, 10"):
        find_model(run, 6)
    (checkpoints / "global_step_10" / "data.pt").write_bytes(b"half")
    with pytest.raises(
        ConfigError, match=r"is half a checkpoint: it lacks the weights or data\.pt, which .* --step 5,"
    ):
        find_model(run, 10)
    (checkpoints / "global_step_5" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ConfigError, match=r"lacks rank 1 of 2 \(a file model_world_size_2_rank_1\.pt\); copy it from"):
        find_model(run)
    (checkpoints / "global_step_5" / "actor" / "model_world_size_2_rank_0.pt").unlink()
    with pytest.raises(ConfigError, match=r"lacks rank 0, 1 of 2"):
        find_model(checkpoints / "global_step_5")
    (checkpoints / "global_step_10" / "actor" / "huggingface" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"is half a checkpoint: it lacks huggingface/config\.json"):
        find_model(checkpoints / "global_step_10" / "actor")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".run.json").touch()
    with pytest.raises(ConfigError, match=r"is a run without a checkpoint; start it again with trainer\.save_freq=N"):
        find_model(tmp_path / "empty")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no folder; expected a run's folder \(outputs/NAME\), a checkpoint of"):
        find_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has neither a checkpoint nor model\.safetensors"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        find_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_model(tmp_path).ranks == 0
    with pytest.raises(ConfigError, match=r"--step 3: .* is a Hugging Face folder; leave --step out"):
        find_model(tmp_path, 3)
    (tmp_path / "megatron" / "actor" / "model" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is a checkpoint of Megatron, .* merge --backend megatron"):
        find_model(tmp_path / "megatron")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="is an adapter without its base"):
        find_model(tmp_path / "adapter")


def test_a_checkpoint_of_verls_sft_trainer(tmp_path: Path) -> None:
    actor = make_checkpoint(tmp_path / "checkpoints" / "step", whole=False)
    step = actor.rename(tmp_path / "checkpoints" / "global_step_7")
    with pytest.raises(ConfigError, match="is half a checkpoint"):
        find_model(tmp_path)
    (step / "data_0.pt").touch()
    assert find_model(tmp_path).folder == step
