"""An exported folder is the model that was trained, and appears only when it is whole."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import find_model
from verl_multiturn.trust import rule
from verl_multiturn.trust.rule import UserFiles

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from verl_multiturn.models import export as exports  # noqa: E402
from verl_multiturn.models.export import ExportError, export  # noqa: E402
from verl_multiturn.models.hash import model_hash  # noqa: E402

pytestmark = pytest.mark.stack
SIZES = {
    "vocab_size": 600, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def quiet(text: str) -> None:
    """Take a line of progress."""


@pytest.fixture(scope="module")
def base() -> Any:
    """Return a tiny model whose embeddings are tied."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
    return transformers.Qwen2ForCausalLM(config).eval()


def write_checkpoint(step: Path, config: Any, *ranks: dict[str, Any]) -> Path:
    """Write a checkpoint as verl's trainer does, and return the folder of its weights."""
    actor = step / "actor"
    config.save_pretrained(actor / "huggingface")
    for number, tensors in enumerate(ranks):
        torch.save(tensors, actor / f"model_world_size_{len(ranks)}_rank_{number}.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": len(ranks)}))
    torch.save({}, step / "data.pt")
    return actor


@pytest.fixture
def actor(tmp_path: Path, base: Any) -> Path:
    return write_checkpoint(tmp_path / "run" / "checkpoints" / "global_step_3", base.config, base.state_dict())


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(24).reshape(2, 12)).logits.float()


def load(folder: Path, dtype: Any = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32).eval()


def test_a_checkpoint_with_tied_embeddings(tmp_path: Path, base: Any, actor: Path) -> None:
    done = export(find_model(actor), tmp_path / "model", None, quiet)
    assert "lm_head.weight" in torch.load(actor / "model_world_size_1_rank_0.pt")
    assert (done.dtype, done.tensors, done.difference, done.rounding, done.lora) == ("float32", 26, 0.0, None, None)
    assert torch.equal(logits(load(tmp_path / "model")), logits(base))
    assert done.model == model_hash(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    assert not (tmp_path / "model" / ".lock").exists()


def test_bfloat16_is_rounded_and_says_so(tmp_path: Path, base: Any, actor: Path) -> None:
    done = export(find_model(actor), tmp_path / "model", "bfloat16", quiet)
    assert (done.dtype, done.difference) == ("bfloat16", 0.0)
    assert done.rounding is not None
    assert 0 < done.rounding < 1
    assert torch.equal(load(tmp_path / "model", torch.bfloat16).lm_head.weight, base.lm_head.weight.bfloat16())


@pytest.fixture
def trained(base: Any) -> Any:
    """Return a LoRA model in PEFT's form, whose update is large."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.Qwen2ForCausalLM(base.config), config).eval()


def write_lora(step: Path, base: Any, trained: Any, only_adapter: bool = False) -> Path:
    tensors = trained.state_dict()
    for name, tensor in base.state_dict().items():
        layer = f"base_model.model.{name}"
        at = layer if layer in tensors else layer.replace(".weight", ".base_layer.weight")
        tensors[at if at in tensors else layer.replace(".bias", ".base_layer.bias")].copy_(tensor)
    kept = {name: tensor for name, tensor in tensors.items() if not only_adapter or "lora_" in name}
    actor = write_checkpoint(step, base.config, kept)
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))
    return actor


def test_lora_is_merged(tmp_path: Path, base: Any, trained: Any) -> None:
    actor = write_lora(tmp_path / "global_step_1", base, trained)
    done = export(find_model(actor), tmp_path / "model", None, quiet)
    assert done.lora is not None
    assert (done.lora.alpha, set(done.lora.ranks.values()), len(done.lora.ranks)) == (16.0, {4}, 4)
    found = logits(load(tmp_path / "model"))
    assert (found - logits(trained)).abs().max() < 1e-4
    assert (found - logits(base)).abs().max() > 0.1
    assert not [name for name in load(tmp_path / "model").state_dict() if "lora" in name]
    assert export(find_model(actor), tmp_path / "small", "bfloat16", quiet).dtype == "bfloat16"


def test_the_adapter_alone_needs_its_base(
    tmp_path: Path, base: Any, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    actor = write_lora(run / "checkpoints" / "global_step_1", base, trained, only_adapter=True)
    with pytest.raises(ConfigError, match=r"has the adapter alone, and its base \(None\) is not here"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    base.save_pretrained(tmp_path / "base")
    (run / "hydra" / ".hydra").mkdir(parents=True)
    (run / "hydra" / ".hydra" / "config.yaml").write_text(
        f"actor_rollout_ref: {{model: {{path: {tmp_path / 'base'}}}}}\n"
    )
    with pytest.raises(ConfigError, match="is not here, or not of a run of yours; name its folder with --base"):
        export(find_model(run), tmp_path / "model", None, quiet)
    with pytest.raises(ConfigError, match="is a checkpoint; name a Hugging Face folder"):
        export(find_model(run), tmp_path / "model", None, quiet, UserFiles(base=actor))
    given = export(find_model(run), tmp_path / "given", None, quiet, UserFiles(base=tmp_path / "base"))
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path)
    done = export(find_model(run), tmp_path / "model", None, quiet)
    assert given.model == done.model
    assert (logits(load(tmp_path / "model")) - logits(trained)).abs().max() < 1e-4
    assert done.base == model_hash(tmp_path / "base")
    assert done.from_base is not None
    assert done.from_base > 0.1


def test_a_wrong_alpha_would_be_noticed(
    tmp_path: Path, base: Any, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = write_lora(tmp_path / "global_step_1", base, trained)
    merge = exports.merge_lora
    monkeypatch.setattr(exports, "merge_lora", lambda base, lora: merge(base, lora) | dict(base))  # verl's merger
    with pytest.raises(ExportError, match=r"the folder's logits differ from the checkpoint's by .* nothing is written"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1"]
    (actor / "lora_train_meta.json").unlink()
    with pytest.raises(ConfigError, match=r"the lora_alpha of .* is None; expected a number above 0"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_adapters_of_other_kinds_are_refused(tmp_path: Path, base: Any, trained: Any) -> None:
    actor = write_lora(tmp_path / "global_step_1", base, trained)
    path = actor / "model_world_size_1_rank_0.pt"
    tensors = torch.load(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight"
    torch.save(tensors | {name: torch.ones(32)}, path)
    with pytest.raises(ConfigError, match="is no weight of plain LoRA on a linear layer; merge this adapter with PEFT"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def split(tensors: dict[str, Any], rank: int, copies: int, shards: int) -> dict[str, Any]:
    """Return a rank's part of tensors as FSDP2 splits them: along the first dimension, each shard in several copies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=copies * shards, store=FakeStore())
    try:
        if copies == 1:
            mesh, places = init_device_mesh("cpu", (shards,), mesh_dim_names=("fsdp",)), [Shard(0)]
        else:
            mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("ddp", "fsdp"))
            places = [Replicate(), Shard(0)]
        parts = {}
        for name, tensor in tensors.items():
            pieces = torch.chunk(tensor, shards)
            piece = pieces[rank % shards] if rank % shards < len(pieces) else tensor[:0]
            parts[name] = DTensor.from_local(
                piece.clone(), mesh, places, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        return parts
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("copies", "shards"), [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_the_number_of_ranks_does_not_count(tmp_path: Path, base: Any, copies: int, shards: int) -> None:
    parts = [split(base.state_dict(), rank, copies, shards) for rank in range(copies * shards)]
    actor = write_checkpoint(tmp_path / "global_step_1", base.config, *parts)
    base.save_pretrained(tmp_path / "base")
    done = export(find_model(actor), tmp_path / "model", None, quiet)
    assert (done.model, done.difference) == (model_hash(tmp_path / "base"), 0.0)


def test_a_damaged_rank_is_named(tmp_path: Path, actor: Path) -> None:
    shard = actor / "model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"rank_0\.pt' is torn or damaged .*; name another checkpoint"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    torch.save({"a": torch.zeros(1), "b": print}, shard)
    with pytest.raises(ConfigError, match="cannot be read as a rank's weights"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_byte_that_changed_on_the_disk_is_noticed(tmp_path: Path, actor: Path) -> None:
    shard = actor / "model_world_size_1_rank_0.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank_0\.pt' is torn or damaged \(the checksum of its part '.*data/\d+'"):
        export(find_model(actor), tmp_path / "model", None, quiet)


@pytest.mark.parametrize("ranks", [(0, 0), (1, 0)])
def test_the_file_of_another_rank_is_refused(tmp_path: Path, base: Any, ranks: tuple[int, int]) -> None:
    parts = [split(base.state_dict(), rank, 1, 2) for rank in ranks]
    actor = write_checkpoint(tmp_path / "global_step_1", base.config, *parts)
    with pytest.raises(ConfigError, match=r"rank_\d\.pt' was written by rank \d, and not by rank \d; copy it again"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_weights_that_do_not_fit_the_configuration(tmp_path: Path, base: Any, actor: Path) -> None:
    shard = actor / "model_world_size_1_rank_0.pt"
    tensors = dict(base.state_dict())
    torch.save({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, shard)
    with pytest.raises(ConfigError, match=r"the weights lack 'model\.norm\.weight'"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    torch.save(tensors | {"value_head.weight": torch.zeros(1)}, shard)
    with pytest.raises(ConfigError, match=r"the weights have 'value_head\.weight'"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    torch.save(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, shard)
    with pytest.raises(ConfigError, match=r"config\.json ties 'lm_head\.weight' to 'model\.embed_tokens\.weight', and"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_a_full_disk_leaves_nothing(tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(ExportError, match=r"cannot write '.*model' \(.*\); nothing is left there"):
            export(find_model(actor), tmp_path / "model", None, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    monkeypatch.setattr(exports.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"needs 0\.1 GB, and 0\.0 GB are free there; name a folder on another disk"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path: Path, actor: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / ".model.half" / "part").mkdir(parents=True)  # of an export that was killed
    (tmp_path / ".model.half" / ".lock").write_text("")
    (tmp_path / "away").mkdir()
    (tmp_path / ".model.half" / "link").symlink_to(tmp_path / "away")
    (tmp_path / ".model.half" / "model.safetensors").write_text("half")
    export(find_model(actor), tmp_path / "model", None, quiet)
    with pytest.raises(ConfigError, match="exists; name a new folder, or remove this one"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_what_no_export_made_is_not_emptied(tmp_path: Path, actor: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "work.txt").write_text("mine")
    (tmp_path / ".model.half").symlink_to(kept)
    with pytest.raises(ConfigError, match=r"\.model\.half', in which .* is none that an export left; move it"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    (tmp_path / ".model.half").unlink()
    kept.rename(tmp_path / ".model.half")
    with pytest.raises(ConfigError, match="is none that an export left"):
        export(find_model(actor), tmp_path / "model", None, quiet)
    assert (tmp_path / ".model.half" / "work.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["..", "two\nlines", "\udcff", "link", "."])
def test_a_name_under_which_no_folder_can_be_put_is_refused_at_once(tmp_path: Path, actor: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"--to .*; name "):
        export(find_model(actor), Path(name) if name == "." else tmp_path / name, None, lambda text: pytest.fail(text))


def test_weights_that_are_no_numbers_are_not_exported(tmp_path: Path, base: Any, actor: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    tensors["model.norm.weight"][0] = float("nan")
    torch.save(tensors, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' has values that are no finite numbers"):
        export(find_model(actor), tmp_path / "model", None, quiet)


def test_a_base_of_another_vocabulary_is_not_compared(
    tmp_path: Path, base: Any, actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = transformers.Qwen2Config(**SIZES | {"vocab_size": 700}, architectures=["Qwen2ForCausalLM"])
    transformers.Qwen2ForCausalLM(other).save_pretrained(tmp_path / "base")
    (tmp_path / "run" / ".run.json").write_text("{}")
    hydra = tmp_path / "run" / "hydra" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {tmp_path / 'base'}}}}}\n")
    assert export(find_model(actor), tmp_path / "strange", None, quiet).base is None
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path)
    done = export(find_model(actor), tmp_path / "model", None, quiet)
    assert (done.base, done.from_base) == (model_hash(tmp_path / "base"), None)
    (hydra / "config.yaml").write_text("a: [\n")
    assert export(find_model(actor), tmp_path / "model2", None, quiet).base is None


def test_a_hugging_face_folder_is_written_again(tmp_path: Path, base: Any) -> None:
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("mine")
    done = export(find_model(tmp_path / "base"), tmp_path / "model", "bfloat16", quiet)
    assert (done.dtype, done.difference) == ("bfloat16", 0.0)
    assert done.written == ["README.md"]
    assert (
        (tmp_path / "model" / "README.md")
        .read_text()
        .startswith(
            f"mine\n\nWritten again by `verl-multiturn export`: weights `{done.model}`, bfloat16, whose rounding "
        )
    )


def run_export(*words: Any) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_command_ends_with_a_json_object(tmp_path: Path, actor: Path) -> None:
    done = run_export(tmp_path / "run", "--to", tmp_path / "model")
    assert done.exit_code == 0
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["model"] == model_hash(tmp_path / "model")
    assert (told["step"], told["ranks"], told["dtype"], told["difference"]) == (3, 1, "float32", 0.0)
    assert "reading rank 0 of 1" in done.stderr


def test_the_command_refuses_with_one_sentence(tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_export(tmp_path / "nothing", "--to", tmp_path / "model")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    done = run_export(actor, "--to", tmp_path / "model", "--dtype", "float16")
    assert done.exit_code == 2
    assert done.stderr == "verl-multiturn: --dtype 'float16': expected one of float32, bfloat16\n"
    monkeypatch.setattr(exports, "_TOLERANCE", -1.0)
    monkeypatch.setattr(exports, "_SHARE", -1.0)
    done = run_export(actor, "--to", tmp_path / "model")
    assert done.exit_code == 1
    assert "the folder's logits differ from the checkpoint's by 0" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "model").exists()
