"""Honest folders for `benchmarks.strangers_folder`: a run, an evaluation, a Hugging Face folder, a corpus, rows.

They are made as the product makes them. A case is a copy of one, with one change.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.evaluation_samples import data_row, write_evaluation
from tests.support.sample_records import START, sample_run, sample_run_file

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "recipes" / "quickstart" / "model"
RUN_CONVERSATIONS, RUN_SCORES = 20, 6.0
"""Content of the honest run's records: conversations that began, and the sum of their scores."""
MARK = "SECRET-OF-THE-READER-7f3a91"
"""Text in every file of the secret folder, and in a variable of the environment."""
SIZES = {
    "vocab_size": 600, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CONFIG = {
    "recipe": {"name": "sums", "out": "outputs/sums"},
    "data": {"train_files": ["train.parquet"], "val_files": ["val.parquet"], "seed": 4},
    "trainer": {"total_training_steps": 2, "default_local_dir": "outputs/sums/checkpoints", "experiment_name": "sums"},
    "actor_rollout_ref": {
        "model": {"path": "outputs/base", "lora_rank": 0, "trust_remote_code": False},
        "rollout": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "name": "sglang_async",
            "multi_turn": {"format": "hermes", "tool_config_path": None, "interaction_config_path": None},
            "custom": {"multiturn": {"record_dir": "outputs/sums/records"}},
        },
    },
    "reward": {"custom_reward_function": {"path": None, "name": "compute_score"}},
}


@dataclass(frozen=True)
class World:
    """The places of a benchmark's run.

    Attributes:
        root: The folder that holds all others.
    """

    root: Path

    @property
    def secrets(self) -> Path:
        """Folder of the reader's own files, which no command should open."""
        return self.root / "secrets"

    @property
    def secret(self) -> Path:
        """A file of the reader's own."""
        return self.secrets / "id_rsa"

    @property
    def canary(self) -> Path:
        """Folder into which code of a stranger writes, if it runs."""
        return self.root / "canaries"

    @property
    def site(self) -> Path:
        """Folder of a module that is on the reader's path, and that strange files name."""
        return self.root / "site"

    def renew(self) -> None:
        """Make the reader's own files anew, as they were before a case."""
        if self.secrets.is_dir():
            shutil.rmtree(self.secrets)
        (self.secrets / "records").mkdir(parents=True)
        self.secret.write_text(f"-----BEGIN {MARK}\n")
        (self.secrets / "tools.json").write_text(json.dumps([{"function": {"name": MARK}}]))
        (self.secrets / "own.txt").write_text(MARK)
        sample_run(self.secrets / "records", steps=1, start="20250101T000000-aaaa")

    def honest(self, kind: str) -> Path:
        """Return an honest folder: `run`, `evaluation`, `model`, `corpus` or `rows`."""
        return self.root / "honest" / kind


def make_world(root: Path) -> World:
    """Make the reader's own files, and the honest folders."""
    world = World(root)
    for folder in (world.canary, world.site, root / "home", root / "tmp"):
        folder.mkdir(parents=True)
    world.renew()
    (world.site / "stranger_canary.py").write_text(_canary(world.canary / "imported by name"))
    _honest_run(world.honest("run"))
    write_evaluation(world.honest("evaluation"), {number: [1.0, 0.0, 1.0, 1.0] for number in range(8)})
    write_evaluation(world.honest("other"), {number: [0.0, 0.0, 1.0, 1.0] for number in range(8)}, model="5c66446dff")
    _model(world.honest("model"))
    world.honest("corpus").mkdir()
    for number in range(3):
        (world.honest("corpus") / f"{number}.txt").write_text(f"Document {number} of tea and of coffee.\n")
    world.honest("rows").mkdir()
    rows = "".join(json.dumps(data_row(number)) + "\n" for number in range(8))
    (world.honest("rows") / "rows.jsonl").write_text(rows)
    return world


def _canary(path: Path) -> str:
    """Return a module that leaves a file when it is imported, and whose names leave it when they are used."""
    return (
        f"import pathlib\npathlib.Path({str(path)!r}).touch()\n"
        "def compute_score(*given, **named):\n    return 1.0\n"
        "class Canary:\n    def __init__(self, *given, **named):\n        self.name = 'canary'\n"
    )


def _honest_run(folder: Path) -> None:
    """Write the folder of a run: records, configuration, metrics, a log, and a checkpoint."""
    sample_run(folder / "records")
    settings = {**sample_run_file()["settings"], **json.loads(json.dumps(CONFIG))}
    write_json(folder / "records" / f"run-{START}.json", sample_run_file(settings=settings))
    (folder / "hydra" / ".hydra").mkdir(parents=True)
    write_json(folder / "hydra" / ".hydra" / "config.yaml", CONFIG)  # JSON is YAML
    (folder / "hydra" / ".hydra" / "overrides.yaml").write_text("[]\n")
    (folder / "hydra" / ".hydra" / "hydra.yaml").write_text("hydra: {}\n")
    metrics = [
        {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.25}},
        {"step": 1, "data": {"critic/score/mean": 0.25, "training/global_step": 1}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    (folder / "train.log").write_text("step:1\n")
    (folder / ".run.json").write_text(json.dumps({"recipe": "sums"}))
    step = folder / "checkpoints" / "global_step_1"
    _model(step / "actor" / "huggingface", weights=False)
    import torch

    torch.save(_torch_model().state_dict(), step / "actor" / "model_world_size_1_rank_0.pt")
    torch.save({}, step / "data.pt")
    write_json(step / "actor" / "fsdp_config.json", {"FSDP_version": 2, "world_size": 1})


def _torch_model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"])
    return transformers.Qwen2ForCausalLM(config).eval()


def _model(folder: Path, weights: bool = True) -> None:
    """Write a Hugging Face folder: a tiny model, the quickstart's tokenizer and template."""
    model = _torch_model()
    if weights:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY / name, folder / name)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def everything(folder: Path) -> Iterator[Path]:
    """Yield all that lies in a folder, links not followed."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from everything(path)
