"""Hostile checkpoints, models, evaluations, corpora and rows for `benchmarks.strangers_folder`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.long.strangers.strangers_cases import DIGITS, Case, guest_code, in_places, link, set_config, sparse, touching
from tests.long.strangers.strangers_material import World, read_json, write_json

ACTOR = Path("checkpoints/global_step_1/actor")
Where = Callable[[Path], Path]


class Touching:
    """An object whose pickle starts a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Return the pickle's function."""
        return os.system, (self._command,)


def model_cases() -> Iterator[Case]:
    """Yield the cases of a run's checkpoint, and of a Hugging Face folder."""
    yield from in_places(
        "run",
        {
            "the rank's weights": lambda folder: folder / ACTOR / "model_world_size_1_rank_0.pt",
            "a note of FSDP": lambda folder: folder / ACTOR / "fsdp_config.json",
            "a note of LoRA": lambda folder: folder / ACTOR / "lora_train_meta.json",
            "a file beside the model": lambda folder: folder / ACTOR / "huggingface" / "notes.txt",
            "the model's configuration": lambda folder: folder / ACTOR / "huggingface" / "config.json",
            "the model's card": lambda folder: folder / ACTOR / "huggingface" / "README.md",
            "the tokenizer": lambda folder: folder / ACTOR / "huggingface" / "tokenizer.json",
            "the sampling": lambda folder: folder / ACTOR / "huggingface" / "generation_config.json",
        },
        {
            "the rank's weights": "pl6", "a note of FSDP": "p6jnl", "a note of LoRA": "pj", "the sampling": "pjl",
            "a file beside the model": "psl6", "the model's configuration": "pjnl", "the model's card": "l",
            "the tokenizer": "pl6",
        },
    )  # fmt: skip
    yield from in_places(
        "model",
        {
            "the weights of a model": lambda folder: folder / "model.safetensors",
            "the weights' index": lambda folder: folder / "model.safetensors.index.json",
            "the configuration of a model": lambda folder: folder / "config.json",
            "the tokenizer of a model": lambda folder: folder / "tokenizer.json",
            "the template of a model": lambda folder: folder / "chat_template.jinja",
            "the tools of a model": lambda folder: folder / "tools.json",
            "the card of a model": lambda folder: folder / "README.md",
        },
        {
            "the weights of a model": "pl6", "the weights' index": "pjn", "the configuration of a model": "pjnl6",
            "the tokenizer of a model": "plj", "the template of a model": "pl6", "the tools of a model": "ljp",
            "the card of a model": "pl",
        },
    )  # fmt: skip
    yield from _pickles()
    for material, place in {
        "run": lambda folder: folder / ACTOR / "huggingface",
        "model": lambda folder: folder,
    }.items():
        yield from _code(material, place)
        yield from _configs(material, place)
    yield from _weights()


def _pickles() -> Iterator[Case]:
    def weights(world: World) -> bytes:
        return pickle.dumps(Touching(touching(world, "a pickle")))

    def put(*names: str) -> Any:
        def change(folder: Path, world: World) -> None:
            for name in names:
                (folder / name).write_bytes(weights(world))

        return change

    def binary(folder: Path, world: World) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(weights(world))

    def zipped(folder: Path, world: World) -> None:
        import torch

        torch.save({"a": Touching(touching(world, "a zipped pickle"))}, folder / ACTOR / "model_world_size_1_rank_0.pt")

    yield Case("a pickle: the rank's weights", "run", put(str(ACTOR / "model_world_size_1_rank_0.pt")), is_short=True)
    yield Case("a pickle: the rank's weights, zipped", "run", zipped)
    yield Case("a pickle: all that is beside them", "run", put(
        "checkpoints/global_step_1/data.pt", str(ACTOR / "optim_world_size_1_rank_0.pt"),
        str(ACTOR / "extra_state_world_size_1_rank_0.pt"), str(ACTOR / "huggingface" / "training_args.bin"),
    ))  # fmt: skip
    yield Case("a pickle: pytorch_model.bin", "model", binary)


def _code(material: str, place: Where) -> Iterator[Case]:
    def changed(name: str, trusts: bool, **entries: Any) -> Any:
        def change(folder: Path, world: World) -> None:
            guest_code(place(folder), world)
            path = place(folder) / name
            write_json(path, read_json(path) | entries)
            if trusts and material == "run":
                set_config(folder, actor_rollout_ref__model__trust_remote_code=True)

        return change

    of_config = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    of_hub = {"AutoConfig": "strangers/none--evil.EvilConfig", "AutoModelForCausalLM": "strangers/none--evil.EvilModel"}
    of_tokenizer = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    for trusts in (False, True) if material == "run" else (False,):
        end = f"of a {material}" + (", trusted by its own configuration" if trusts else "")
        yield Case(f"code: auto_map {end}", material, changed("config.json", trusts, auto_map=of_config,
                   model_type="evil"), is_short=trusts)  # fmt: skip
        yield Case(
            f"code: auto_map of a known kind {end}", material, changed("config.json", trusts, auto_map=of_config)
        )
        yield Case(f"code: auto_map of the hub {end}", material, changed("config.json", trusts, auto_map=of_hub))
        tokenizer = changed("tokenizer_config.json", trusts, auto_map=of_tokenizer, tokenizer_class="EvilTokenizer")
        yield Case(f"code: auto_map of the tokenizer {end}", material, tokenizer)


def _configs(material: str, place: Where) -> Iterator[Case]:
    def changed(name: str, entries: dict[str, Any]) -> Any:
        def change(folder: Path, world: World) -> None:
            path = place(folder) / name
            text = json.dumps((read_json(path) if path.is_file() else {}) | entries)
            path.write_text(text.replace('"DIGITS"', DIGITS).replace("SECRETS", str(world.secrets)))

        return change

    of_config: dict[str, dict[str, Any]] = {
        "attention of the hub": {
            "_attn_implementation": "strangers/kernels",
            "attn_implementation": "strangers/kernels",
        },
        "a quantizer": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "a million layers": {"num_hidden_layers": 1_000_000},
        "a hidden size of 10^9": {"hidden_size": 10**9, "vocab_size": 10**9},
        "an intermediate size of 10^7": {"intermediate_size": 10**7},
        "positions of 10^9": {"max_position_embeddings": 10**9, "sliding_window": 10**9},
        "a number of 100,000 digits": {"vocab_size": "DIGITS"},
        "a vocabulary below zero": {"vocab_size": -5},
        "another name": {"_name_or_path": "strangers/none", "base_model_name_or_path": "strangers/none"},
    }
    for name, entries in of_config.items():
        yield Case(f"config.json of a {material}: {name}", material, changed("config.json", entries), counted=False)
    of_tokenizer: dict[str, dict[str, Any]] = {
        "a vocabulary of the reader": {"tokenizer_class": "Qwen2Tokenizer", "vocab_file": "SECRETS/own.txt",
                                       "merges_file": "SECRETS/own.txt", "tokenizer_file": "SECRETS/own.txt"},
        "a name of the hub": {"name_or_path": "strangers/none", "tokenizer_class": "LlamaTokenizer"},
        "an endless template": {"chat_template": "{% for i in range(10 ** 10) %}x{% endfor %}"},
        "a template of objects": {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"},
    }  # fmt: skip
    for name, entries in of_tokenizer.items():

        def change(folder: Path, world: World, entries: dict[str, Any] = entries) -> None:
            if "chat_template" in entries:
                (place(folder) / "chat_template.jinja").write_text(entries["chat_template"])
            changed("tokenizer_config.json", entries)(folder, world)

        yield Case(f"tokenizer of a {material}: {name}", material, change, counted=False)
    adapter = {"base_model_name_or_path": "strangers/none", "peft_type": "LORA", "task_type": "CAUSAL_LM",
               "auto_mapping": {"base_model_class": "Evil", "parent_library": "stranger_canary"}}  # fmt: skip
    yield Case(f"an adapter of a {material} with a remote base", material, changed("adapter_config.json", adapter))
    yield Case(f"an adapter of a {material} with the reader's base", material,
               changed("adapter_config.json", adapter | {"base_model_name_or_path": "SECRETS/model"}))  # fmt: skip


def _weights() -> Iterator[Case]:
    def header(size: int, text: bytes) -> Any:
        def change(folder: Path, world: World) -> None:
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text)

        return change

    def mapped(target: str) -> Any:
        def change(folder: Path, world: World) -> None:
            shutil.move(folder / "model.safetensors", world.secrets / "own.safetensors")
            name = target.replace("SECRETS", str(world.secrets))
            names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
            write_json(
                folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
            )

        return change

    huge = json.dumps({"a": {"dtype": "F32", "shape": [10**9, 10**3], "data_offsets": [0, 4 * 10**12]}}).encode()
    yield Case("safetensors: a header of 2^62 bytes", "model", header(1 << 62, b"{}"))
    yield Case("safetensors: a header of 90 MB", "model", header(90 << 20, b"{" + b" " * (90 << 20)))
    yield Case("safetensors: a tensor of 4 TB", "model", header(len(huge), huge))
    yield Case("safetensors: depth", "model", header(100_000, b"[" * 100_000))
    yield Case("a weight map that leads out", "model", mapped("../../../secrets/own.safetensors"), is_short=True)
    yield Case("a weight map with an absolute path", "model", mapped("SECRETS/own.safetensors"))


def other_cases() -> Iterator[Case]:
    """Yield the cases of evaluations, corpora and rows."""
    yield from in_places(
        "evaluation",
        {
            "the note of an evaluation": lambda folder: folder / "evaluation.json",
            "records of an evaluation": lambda folder: next((folder / "records").glob("*.jsonl.gz")),
            "a join of an evaluation": lambda folder: next((folder / "records" / "join").glob("*.parquet")),
        },
        {"the note of an evaluation": "p6jnld", "records of an evaluation": "plj", "a join of an evaluation": "p6"},
    )
    yield from in_places("corpus", {"a document": lambda folder: folder / "0.txt"}, {"a document": "pldfs6"})
    yield from in_places(
        "corpus", {"lines of a corpus": lambda folder: folder / "x.jsonl"}, {"lines of a corpus": "pjnl"}
    )
    yield from in_places("rows", {"rows": lambda folder: folder / "rows.jsonl"}, {"rows": "pdjns6"})

    def noted(**entries: Any) -> Any:
        def change(folder: Path, world: World) -> None:
            path = folder / "evaluation.json"
            write_json(path, read_json(path) | entries)

        return change

    def copied(folder: Path, world: World) -> None:
        for path in list((folder / "records").iterdir()):
            if path.is_file() and not path.name.startswith("run-"):
                shutil.copyfile(path, path.with_name(f"copy-{path.name}"))

    def joined(folder: Path, world: World) -> None:
        path = next((folder / "records" / "join").glob("*.parquet"))
        shutil.copyfile(path, path.with_name(path.name.replace("000000", "000001")))

    def corpus(folder: Path, world: World) -> None:
        link(folder / "own", world.secrets)
        (folder / "a\n\x1b[2J.txt").write_text("tea")

    def bomb(folder: Path, world: World) -> None:
        (folder / "x.jsonl").write_text('{"text": "tea", "id": ' + "9" * 100_000 + "}\n")
        sparse(folder / "y.md")

    yield Case("an evaluation: copies of its records", "evaluation", copied, is_short=True)
    yield Case("an evaluation: its join again under another step", "evaluation", joined)
    notes: dict[str, dict[str, Any]] = {
        "rows beyond all": {"rows": 10**18}, "samples beyond all": {"samples": 10**18}, "words": {"recipe": "\x1b[2J"},
        "another model": {"model": {"path": "x", "hash": "y" * 10**6}}, "no rows": {"rows": 0},
    }  # fmt: skip
    for name, entries in notes.items():
        yield Case(f"an evaluation: {name}", "evaluation", noted(**entries), counted=False)
    yield Case("a corpus with a link to a folder", "corpus", corpus)
    yield Case("a corpus with numbers and 6 GB", "corpus", bomb)
