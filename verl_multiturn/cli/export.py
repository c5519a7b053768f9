"""`verl-multiturn export`: writes a trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.models.export import DTYPES, ExportError
from verl_multiturn.models.export import export as write_export
from verl_multiturn.models.export_result import ExportReport
from verl_multiturn.models.location import Model, find_model
from verl_multiturn.observe.show.terminal import clean
from verl_multiturn.trust.rule import MODEL_CODE_HELP, TOOLS_HELP, UserFiles

_NO_STACK = "export needs torch, transformers, accelerate and peft ({error}); run it in the environment that trains"


def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run's folder, a checkpoint of verl, or a Hugging Face folder.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to write; it must be new or empty.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (the newest whole one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the weights: float32 or bfloat16 (the trainer's).")
    ] = None,
    tools: Annotated[Path | None, typer.Option("--tools", metavar="FILE", help=TOOLS_HELP)] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", metavar="DIR", help="Folder of the model that the run began with, to compare with."),
    ] = None,
    model_code: Annotated[bool, typer.Option("--trust-remote-code", help=MODEL_CODE_HELP)] = False,
) -> None:
    """Export a trained model as a Hugging Face folder, with its tools, sampling and a card.

    LoRA is merged. The folder is loaded and its logits are compared with the checkpoint's before it gets its name. The
    last line is a JSON object.

    Nothing that MODEL names is imported, started or fetched, so that it may be somebody else's.
    """
    began = time.monotonic()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        found = find_model(model, step)
        if found.passed_over:
            _tell(found.passed_over)
        _quiet_transformers()
        done = write_export(found, to, dtype, _tell, UserFiles(model_code, tools, base))
    except ExportError as error:
        fail(str(error))
    except MultiTurnError as error:
        refuse(error)
    except ImportError as error:
        fail(_NO_STACK.format(error=error), status=2)
    _print_table(found, done)
    print(json.dumps(_summary(found, done) | {"seconds": round(time.monotonic() - began, 1)}))


def _tell(text: str) -> None:
    print(clean(text), file=sys.stderr, flush=True)


def _quiet_transformers() -> None:
    """Keep transformers' own progress bars and notes out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _print_table(model: Model, done: ExportReport) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    ranks = f"{model.ranks} rank{'s' if model.ranks != 1 else ''} of FSDP" if model.ranks else "a Hugging Face folder"
    step = "" if model.step is None else f"step {model.step}, "
    rows = [("from", f"{model.folder} ({step}{ranks})")]
    if done.lora is not None:
        rank, layers = max(done.lora.ranks.values()), len(done.lora.ranks)
        rows.append(("LoRA", f"rank {rank}, alpha {done.lora.alpha:g}, in {layers} layers; merged in float32"))
    rows.append(("to", f"{done.folder} ({done.dtype}, {done.parameters:,} parameters, {done.size / 1e6:,.1f} MB)"))
    rows.append(
        ("check", f"logits differ from the checkpoint's by {done.difference:.1e}; {done.allowed:.0e} is allowed")
    )
    if done.rounding is not None:
        rows.append(("rounding", f"to {done.dtype} changed logits by up to {done.rounding:.1e}"))
    if done.from_base == 0:
        rows.append(("training", f"changed nothing: the logits are those of the base {done.base}"))
    elif done.from_base is not None:
        rows.append(("training", f"changed logits by up to {done.from_base:.2g}, beside the base {done.base}"))
    elif model.ranks and done.base is None:
        rows.append(("base", "not at hand, so not compared"))
    rows.append(("weights", done.model))
    rows.append(("written", ", ".join(done.written) or "weights, configuration and tokenizer"))
    for name, value in rows:
        table.add_row(name, escape(value.encode("utf-8", "backslashreplace").decode()))  # a path may be no UTF-8
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table, highlight=False)


def _summary(model: Model, done: ExportReport) -> dict[str, Any]:
    return {
        "to": str(done.folder),
        "from": str(model.folder),
        "step": model.step,
        "ranks": model.ranks,
        "model": done.model,
        "base": done.base,
        "dtype": done.dtype,
        "tensors": done.tensors,
        "parameters": done.parameters,
        "bytes": done.size,
        "lora_rank": None if done.lora is None else max(done.lora.ranks.values()),
        "difference": done.difference,
        "rounding": done.rounding,
        "from_base": done.from_base,
        "written": done.written,
    }
