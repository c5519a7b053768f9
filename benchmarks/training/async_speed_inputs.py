"""Inputs of the training in `benchmarks.async_speed`.

- the quickstart's tasks as rows that give the calculator their number;
- a tool YAML with the slow calculator;
- the quickstart's model after a few steps of SFT, so that it calls most of the time.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart"
CALL_SHARE = 0.95
_SFT_STEPS, _SFT_ROWS, _SFT_RATE = 40, 32, 1e-3


def recipe_module(name: str) -> Any:
    """Return a module of the quickstart's folder."""
    if str(RECIPE) not in sys.path:
        sys.path.insert(0, str(RECIPE))
    return importlib.import_module(name)


def write_rows(folder: Path, count: int, seed: int) -> list[str]:
    """Write the rows, and return the settings of the run that reads them, in their order.

    Args:
        folder: Folder that gets the files.
        count: Number of training rows.
        seed: Seed of the tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_rows = recipe_module("prepare_data").make_rows
    for split, size in (("train", count), ("test", 8)):
        rows = make_rows(split, size, seed, [])
        for row in rows:
            number = {"row": row["extra_info"]["index"]}
            row["extra_info"]["tools_kwargs"] = {"calculator": {"create_kwargs": number}}
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    return [f"data.{split}_files={folder / name}.parquet" for split, name in (("train", "train"), ("val", "test"))] + [
        "data.shuffle=False"
    ]


def write_tools(file: Path, journal: Path, samples: int) -> str:
    """Write the tool YAML of a run, and return the setting that names it.

    Args:
        file: The YAML file.
        journal: The journal that the tool writes.
        samples: Number of conversations in a group.
    """
    entry = yaml.safe_load((ROOT / "tool_configs" / "calculator.yaml").read_text())["tools"][0]
    entry["class_name"] = "benchmarks.slow_calculator.SlowCalculator"
    entry["config"] = {"samples": samples, "journal": str(journal)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    return f"recipe.tools={file}"


def write_model(folder: Path, seed: int) -> str:
    """Train the quickstart's model to call most of the time, and return the setting that names it.

    It is trained as `recipes/quickstart/make_model.py` does, with more conversations that call.

    Args:
        folder: Folder that gets the model; one that has it already is not changed.
        seed: Seed of the choice of conversations.
    """
    setting = f"actor_rollout_ref.model.path={folder}"
    if (folder / "config.json").is_file():
        return setting
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    maker = recipe_module("make_model")
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(RECIPE / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(RECIPE / "model")
    tools = [entry["tool_schema"] for entry in yaml.safe_load(maker.TOOL_CONFIG.read_text())["tools"]]
    entries = maker.make_entries(_SFT_STEPS * _SFT_ROWS, seed=30_000_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_SFT_RATE, betas=(0.9, 0.98))
    for step in range(_SFT_STEPS):
        chosen = entries[step * _SFT_ROWS : (step + 1) * _SFT_ROWS]
        talks = [maker.conversation(entry, rng.random() < CALL_SHARE, rng) for entry in chosen]
        ids_BT, labels_BT = maker.batch_of(
            [maker.encode(tokenizer, talk, tools) for talk in talks], tokenizer.pad_token_id
        )
        optimizer.param_groups[0]["lr"] = _SFT_RATE * (1 - step / _SFT_STEPS)
        model(input_ids=ids_BT, labels=labels_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return setting
