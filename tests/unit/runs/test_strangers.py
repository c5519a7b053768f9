"""A run's folder that somebody else made is data: nothing of it is started, imported, fetched or resolved."""

import json
import os
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app
from verl_multiturn.models.location import find_model

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.unit.runs.test_export import SIZES, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"])
    return transformers.Qwen2ForCausalLM(config).eval()


@pytest.fixture
def actor(tmp_path: Path, model: Any) -> Path:
    """Return the checkpoint of a run whose folder somebody else made."""
    return write_checkpoint(tmp_path / "run" / "checkpoints" / "global_step_3", model.config, dict(model.state_dict()))


def configure(run: Path, text: str) -> None:
    """Write the configuration of a run."""
    (run / ".run.json").write_text("{}")
    (run / "hydra" / ".hydra").mkdir(parents=True, exist_ok=True)
    (run / "hydra" / ".hydra" / "config.yaml").write_text(text)


def command(name: str, *words: Any) -> Any:
    return CliRunner().invoke(app, [name, *map(str, words)])


def exported(tmp_path: Path, *words: Any) -> Any:
    return command("export", tmp_path / "run", "--to", tmp_path / "out", *words)


def test_an_export_starts_no_program_of_the_folder(tmp_path: Path, actor: Path) -> None:
    mark = tmp_path / "started"
    (tmp_path / "run" / "tools.yaml").write_text(
        json.dumps({"tools": [{"mcp": {"command": "sh", "args": ["-c", f"touch {mark}"]}}]})
    )
    place = tmp_path / "run" / "tools.yaml"
    configure(tmp_path / "run", f"actor_rollout_ref: {{rollout: {{multi_turn: {{tool_config_path: {place}}}}}}}\n")
    done = exported(tmp_path)
    assert not mark.exists()
    assert done.exit_code == 0, done.stderr
    assert not (tmp_path / "out" / "tools.json").exists()
    assert "tools.json is not written: " in done.stderr
    assert "--tools FILE" in done.stderr


def test_an_export_imports_no_module_that_the_folder_names(
    tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "run" / "theirs.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef tool(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "run"))
    (tmp_path / "run" / "tools.yaml").write_text(json.dumps({"tools": [{"function": "theirs.tool"}]}))
    place = tmp_path / "run" / "tools.yaml"
    configure(
        tmp_path / "run",
        f"actor_rollout_ref: {{rollout: {{custom: {{multiturn: {{tool_config_path: {place}}}}}, "
        f"multi_turn: {{tool_config_path: {place}}}}}}}\n",
    )
    assert exported(tmp_path).exit_code == 0
    assert not mark.exists()
    assert "theirs" not in sys.modules


def test_the_tools_of_the_user_are_exported(tmp_path: Path, actor: Path) -> None:
    configure(tmp_path / "run", "actor_rollout_ref: {rollout: {multi_turn: {tool_config_path: nowhere.yaml}}}\n")
    done = exported(tmp_path, "--tools", ROOT / "tool_configs" / "calculator.yaml")
    assert done.exit_code == 0, done.stderr
    (tool,) = json.loads((tmp_path / "out" / "tools.json").read_text())
    assert tool["function"]["name"] == "calculator"


def own_code(actor: Path, mark: Path) -> None:
    """Give a checkpoint a model with Python files of its own."""
    folder = actor / "huggingface"
    (folder / "theirs.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class Config(Qwen2Config):\n    model_type = 'theirs'\n"
        "class TheirsForCausalLM(Qwen2ForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "theirs"
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.TheirsForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_models_own_code_is_run_by_the_flag_alone(
    tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "code"
    own_code(actor, mark)
    configure(tmp_path / "run", "actor_rollout_ref: {model: {trust_remote_code: true}}\n")
    done = exported(tmp_path)
    assert not mark.exists()
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()[-1:]) == 1
    assert "--trust-remote-code" in done.stderr
    done = exported(tmp_path, "--trust-remote-code")
    assert mark.exists()


def test_code_of_a_model_that_needs_none_is_left_out(tmp_path: Path, actor: Path) -> None:
    folder = actor / "huggingface"
    (folder / "evil.py").write_text("")
    for name in ("config.json", "tokenizer_config.json"):
        value = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(value | {"auto_map": {"AutoConfig": "evil.Config"}}))
    done = exported(tmp_path)
    assert done.exit_code == 0, done.stderr
    what = "'evil.py', auto_map of 'tokenizer_config.json'; --trust-remote-code keeps it"
    assert what in done.stderr
    assert "auto_map of 'config.json'" in done.stderr
    out = tmp_path / "out"
    assert not list(out.glob("*.py"))
    assert not [path for path in out.glob("*.json") if "auto_map" in path.read_text()]


SECRET = "hf_SECRETSECRET"


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:THEIR_TOKEN}",
        "${oc.env:THEIR_TOKEN,other}",
        "a${oc.env:THEIR_TOKEN}",
        "${ oc.env : THEIR_TOKEN }",
        "${oc.decode:${oc.env:THEIR_TOKEN}}",
        "${oc.select:nowhere,${oc.env:THEIR_TOKEN}}",
        "${place.${oc.env:THEIR_TOKEN}}",
        "${other.token}",
        "${oc.dict.values:other}",
    ],
)
def test_no_variable_of_the_environment_comes_into_the_card(
    tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("THEIR_TOKEN", SECRET)
    config = {"recipe": {"name": value}, "data": {"seed": value}, "other": {"token": "${oc.env:THEIR_TOKEN}"}}
    configure(tmp_path / "run", json.dumps(config))
    assert exported(tmp_path).exit_code == 0
    assert SECRET not in (tmp_path / "out" / "README.md").read_text()
    assert SECRET not in str(find_model(tmp_path / "run").settings)


@pytest.mark.parametrize("place", ["huggingface/notes.txt", "huggingface/more", "lora_train_meta.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, actor: Path, place: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "key").write_text("ssh-private-key")
    (actor / place).symlink_to(tmp_path / "mine" if place.endswith("more") else tmp_path / "mine" / "key")
    done = exported(tmp_path)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "leads out of the folder" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_link_within_the_folder_is_followed(tmp_path: Path, actor: Path) -> None:
    (tmp_path / "run" / "notes.txt").write_text("ours")
    (actor / "huggingface" / "notes.txt").symlink_to("../../../../notes.txt")
    assert exported(tmp_path).exit_code == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "ours"


@pytest.mark.parametrize("place", ["huggingface/notes.txt", "huggingface/config.json", "fsdp_config.json"])
def test_a_pipe_is_refused(tmp_path: Path, actor: Path, place: str) -> None:
    (actor / place).unlink(missing_ok=True)
    os.mkfifo(actor / place)
    done = exported(tmp_path)
    assert done.exit_code == 2
    assert "is no file" in done.stderr or "lacks huggingface/config.json" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1_000_000},
        {"hidden_size": 10**9, "vocab_size": 10**9},
        {"vocab_size": -5},
        {"num_attention_heads": 0},
        {"architectures": ["TheirsForCausalLM"], "model_type": "theirs"},
        {"rope_scaling": {"rope_type": "theirs"}},
        {"dtype": "theirs"},
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(tmp_path: Path, actor: Path, change: dict[str, Any]) -> None:
    path = actor / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = exported(tmp_path)
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("verl-multiturn: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_of_many_layers_is_not_built(tmp_path: Path, model: Any) -> None:
    folder = tmp_path / "run"
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 100_000, "layer_types": None}))
    done = exported(tmp_path)
    assert (done.exit_code, "speaks of more parameters than its weights have" in done.stderr) == (2, True)


def test_tensors_that_are_larger_than_their_file_are_refused(tmp_path: Path, actor: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**10)}, actor / "model_world_size_1_rank_0.pt")
    done = exported(tmp_path)
    assert (done.exit_code, "holds tensors that are larger than the file" in done.stderr) == (2, True)
    torch.save({"a": torch.empty(4, device="meta")}, actor / "model_world_size_1_rank_0.pt")
    assert "holds no weights by name" in exported(tmp_path).stderr


def test_compressed_weights_are_refused(tmp_path: Path, actor: Path) -> None:
    with zipfile.ZipFile(actor / "model_world_size_1_rank_0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    done = exported(tmp_path)
    assert (done.exit_code, "a part of it is compressed" in done.stderr) == (2, True)


def test_an_export_is_offline(tmp_path: Path, actor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    configure(tmp_path / "run", "actor_rollout_ref: {model: {path: theirs/base}}\n")
    assert exported(tmp_path).exit_code == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert asked == []


def test_the_base_of_a_stranger_is_not_opened(tmp_path: Path, actor: Path, model: Any) -> None:
    model.save_pretrained(tmp_path / "base")
    configure(tmp_path / "run", f"actor_rollout_ref: {{model: {{path: {tmp_path / 'base'}}}}}\n")
    assert json.loads(exported(tmp_path).stdout.splitlines()[-1])["base"] is None
    done = command("export", tmp_path / "run", "--to", tmp_path / "again", "--base", tmp_path / "base")
    assert json.loads(done.stdout.splitlines()[-1])["from_base"] == 0.0


def test_a_link_in_the_place_of_the_checkpoints_is_refused(tmp_path: Path, actor: Path) -> None:
    configure(tmp_path / "run", "a: 1\n")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "private")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "private")
    done = exported(tmp_path)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "a link that leads out of the folder, to" in done.stderr
