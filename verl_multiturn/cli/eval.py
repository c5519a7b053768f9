"""`verl-multiturn eval`: a model's figures on a recipe's rows, by the trainer's own loop and reward, without the trainer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_multiturn.cli.ends import fail, refuse
from verl_multiturn.errors import ConfigError, EngineError, MultiTurnError
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.evaluation.tables import summary_of, table_of
from verl_multiturn.launch.compose import compose_run, resolved
from verl_multiturn.launch.models import FoundModel, find_model
from verl_multiturn.launch.plan import RunPlan, plan_run
from verl_multiturn.launch.processes import interruptible
from verl_multiturn.launch.run import environment_of, run_recipe
from verl_multiturn.launch.run_folder import RunFolder, require_folder
from verl_multiturn.observe.progress import say


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL…", help="Folders of models, in the form of Hugging Face.")
    ],
    recipe: Annotated[str, typer.Option(help="Name, as `recipe list` shows it, or the path of a recipe's folder.")],
    variants: Annotated[
        list[str] | None, typer.Option("--variant", help="A variant, from `variant/*.yaml`; repeatable.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="As the recipe's smoke run, on a CPU.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE: one of Hydra's overrides; repeatable.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only the rows of this data source.")] = None,
    rows: Annotated[
        list[Path] | None, typer.Option("--rows", help="A file of rows in the place of the recipe's validation.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Conversations for each row (rollout.val_kwargs.n).")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of the sampling (rollout.val_kwargs.temperature).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="sglang, started here; or the address of SGLang, or of an endpoint that ends in /v1.")
    ] = "sglang",
    out: Annotated[Path | None, typer.Option(help="Folder of the evaluation; where one is, it goes on.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also with another template, tokenizer or tools than the model's run had.")
    ] = False,
) -> None:
    """Evaluate models on a recipe's rows as its training would: settings, tools, users, agents and rewards are its own.

    A command that was ended goes on where it is repeated. The last line is a JSON object.
    """
    try:
        if engine != "sglang" and not engine.startswith(("http://", "https://")):
            raise ConfigError(f"--engine {engine!r}: expected sglang, or an address that begins with http")
        if engine != "sglang" and len(models) > 1:
            raise ConfigError(f"--engine {engine!r} serves one model, and {len(models)} are named; name one")
        found = [find_model(model) for model in models]
        plans = [
            plan_run(recipe, variants=variants or [], smoke=smoke, out=folder, overrides=changes or [])
            for folder in _folders(found, out, recipe, variants or [], smoke)
        ]
        with interruptible():
            whole = [
                _evaluate(plan, model, rows, only, samples, temperature, engine, anyway)
                for plan, model in zip(plans, found, strict=True)
            ]
    except KeyboardInterrupt:
        fail("interrupted; what has ended is kept, and the same command goes on", 130)
    except EngineError as error:
        fail(str(error))
    except MultiTurnError as error:
        refuse(error)
    console, told = Console(), []
    for plan in plans:
        results = read_results(plan.out)
        console.print(table_of(results))
        told.append(summary_of(results))
    print(json.dumps(told[0] if len(told) == 1 else {"models": told}))
    if not all(whole):
        fail("some conversations are invalid or were not judged; the same command asks for them again")


def _folders(
    found: Sequence[FoundModel], out: Path | None, recipe: str, variants: Sequence[str], smoke: bool
) -> list[Path]:
    """Return the folder of each model's evaluation."""
    names = [model.folder.name for model in found]
    names = [name if names.count(name) == 1 else model.weights for name, model in zip(names, found, strict=True)]
    if out is not None and len(found) == 1:
        require_folder(out, f"--out {str(out)!r}")
        return [out]
    if out is None:
        parts = [Path(recipe).name, *variants, *(["smoke"] if smoke else [])]
        out = Path("outputs") / "-".join(["eval", *parts])
    return [out / name for name in names]


def _evaluate(
    plan: RunPlan,
    model: FoundModel,
    rows: Sequence[Path] | None,
    only: str | None,
    samples: int | None,
    temperature: float | None,
    engine: str,
    anyway: bool,
) -> bool:
    if rows is None and (status := run_recipe(plan, only_prepare=True)):
        raise typer.Exit(status)
    # What recipes name (recipes.NAME.module), and the platform, are known before verl is imported.
    os.environ.update(environment_of(plan, resolved(compose_run(plan))))
    if str(plan.root) not in sys.path:
        sys.path.insert(1, str(plan.root))
    with RunFolder(plan.out).held(), Console(stderr=True).status("verl is imported") as status:
        try:
            from verl_multiturn.verl_bridge.evaluate.command import evaluate
            from verl_multiturn.verl_bridge.evaluate.settings import Job
        except ImportError as error:
            fail(f"an evaluation needs verl and SGLang ({error}); run it in the environment that trains", 2)
        job = Job(
            plan,
            model.folder,
            model.weights,
            model.named,
            None if rows is None else tuple(path.resolve() for path in rows),
            only,
            samples,
            temperature,
            engine,
            None if anyway else model.origin,
        )
        return evaluate(job, say, status.update)
