"""`verl-multiturn eval`: a model's figures on a recipe's rows, by the trainer's own loop and reward."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from verl_multiturn.cli.ends import fail, refuse, wide_console
from verl_multiturn.cli.options import Changes, Smoke, Variants
from verl_multiturn.clients.chat_endpoint import check_address
from verl_multiturn.clients.http_connections import is_http
from verl_multiturn.errors import ConfigError, EngineError, MultiTurnError
from verl_multiturn.evaluation.benchmarks.protocol import NamedBenchmark
from verl_multiturn.evaluation.chat_address import chat_address
from verl_multiturn.evaluation.figures import Price
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.evaluation.tables import summary_of, table_of
from verl_multiturn.models.evaluation_model import (
    EvaluatedModel,
    evaluated,
    names_of,
    require_trusted,
    rows_of_run,
    runs_model_code,
)
from verl_multiturn.models.export import ExportError
from verl_multiturn.models.location import Model, find_model
from verl_multiturn.rows.files import READERS, read_rows
from verl_multiturn.runs.benchmark import benchmark_options, plan_benchmark
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.environment import environment_of
from verl_multiturn.runs.plan import RunPlan, chosen_outputs, plan_run
from verl_multiturn.runs.processes import interruptible
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.run import run_recipe
from verl_multiturn.runs.run_folder import RunFolder, require_folder
from verl_multiturn.runs.setting_differences import setting_differences
from verl_multiturn.trust.rule import MODEL_CODE_HELP, TRUST_HELP, import_from_here


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL…", help="Runs, checkpoints of verl, or Hugging Face folders."),
    ],
    recipe: Annotated[
        str | None, typer.Option(help="Name, as `recipe list` shows it, or the path of a recipe's folder.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A benchmark in the place of a recipe, by its published protocol."),
    ] = None,
    variants: Variants = None,
    smoke: Smoke = False,
    changes: Changes = None,
    only: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only the rows of this data source.")] = None,
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            "--rows",
            help="A file of rows in the place of the recipe's validation; of a benchmark its file or folder, as its "
            "authors publish it.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Conversations of each row (val_kwargs.n).")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="Temperature of the sampling (rollout.val_kwargs.temperature)."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="sglang, started here; or an address: of SGLang, of an endpoint that ends in /v1, or of a model that "
            "is asked in words, as in https://api.openai.com/v1/chat/completions#MODEL."
        ),
    ] = "sglang",
    out: Annotated[Path | None, typer.Option(help="Folder of the evaluation; where one is, it goes on.")] = None,
    price: Annotated[
        str | None, typer.Option(metavar="PROMPT,SAMPLED", help="Prices of a million tokens, for the table's costs.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also with another template, tokenizer or tools than the model's run had.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
    model_code: Annotated[bool, typer.Option("--trust-remote-code", help=MODEL_CODE_HELP)] = False,
) -> None:
    """Evaluate models on a recipe's rows as its training would: settings, tools, users, agents and rewards are its own.

    With `--benchmark` they are those of a benchmark's published protocol. A command that was ended goes on where it is
    repeated. The last line is a JSON object.
    """
    try:
        check_engine(engine)
        if engine != "sglang" and len(models) > 1:
            raise ConfigError(f"--engine {engine!r} serves one model, and {len(models)} are named; name one")
        cost = None if price is None else Price.parse(price)
        named = None
        if benchmark is not None and recipe is None:
            named = benchmark_options(benchmark, rows or [], variants or [], smoke, changes or [])
        chosen = recipe if named is None else named.protocol.recipe
        if chosen is None or (recipe is not None and benchmark is not None):
            given = "neither" if chosen is None else f"--recipe {recipe!r} and --benchmark {benchmark!r}"
            raise ConfigError(f"expected one of --recipe and --benchmark, got {given}; give exactly one")
        for file in (rows or []) if named is None else []:
            if not read_rows(file, list(READERS)):
                raise ConfigError(f"--rows {str(file)!r} has no rows; name a file that has some")
        asked = EvalOptions(only, samples, temperature, engine, anyway)
        recipes_outputs = chosen_outputs(chosen)
        trusted = [require_trusted("eval", path, trust, recipes_outputs) for path in models]
        import_from_here(*models, is_trusted=trust)
        found = [find_model(model, is_trusted=usable) for model, usable in zip(models, trusted, strict=True)]
        folders = _folders(found, out, benchmark or chosen, variants or [], smoke)
        if named is not None:
            planned = [plan_benchmark(named, folder) for folder in folders]
            plans, asked = [plan for plan, _ in planned], asked._replace(benchmark=planned[0][1])
        else:
            plans = [
                plan_run(chosen, variants=variants or [], smoke=smoke, out=folder, overrides=changes or [])
                for folder in folders
            ]
            set_here = (["n"] if samples is not None else []) + (
                ["temperature", "do_sample"] if temperature is not None else []
            )
            for plan, model in zip(plans, found, strict=True):
                if difference := setting_differences(model, plan, set_here):
                    say(difference)
        with interruptible():
            whole = []
            for plan, model, path in zip(plans, found, models, strict=True):
                own = None if named is not None else tuple(rows) if rows else rows_of_run(model)
                if own is None and (status := run_recipe(plan, only_prepare=True)):
                    raise typer.Exit(status)
                runs_code = runs_model_code(model, trust, model_code)
                weights = evaluated(str(path), model, plan.out, say, runs_code)
                whole.append(evaluate_model(plan, weights, own, asked, runs_code))
    except KeyboardInterrupt:
        fail("interrupted; what has ended is kept, and the same command goes on", 130)
    except (EngineError, ExportError) as error:
        fail(str(error))
    except MultiTurnError as error:
        refuse(error)
    console, told = wide_console(), []
    for plan in plans:
        results = read_results(plan.out)
        console.print(table_of(results, cost))
        told.append(summary_of(results, cost))
        whole.append(results.whole == results.evaluation.rows)  # an unwritten conversation has no score, either
    print(json.dumps(told[0] if len(told) == 1 else {"models": told}))
    if not all(whole):
        fail("some conversations are invalid or failed; the same command asks for them again")


class EvalOptions(NamedTuple):
    """Options of an evaluation."""

    only: str | None
    samples: int | None
    temperature: float | None
    engine: str
    anyway: bool
    benchmark: NamedBenchmark | None = None
    """The benchmark in the place of a recipe; None: a recipe."""


def check_engine(engine: str) -> None:
    """Refuse an engine that cannot be used.

    Raises:
        ConfigError: It is neither `sglang` nor the address of such an endpoint.
    """
    if engine != "sglang" and not is_http(engine):
        raise ConfigError(f"--engine {engine!r}: expected sglang, or an address that begins with http")
    if engine != "sglang":
        check_address(engine.partition("#")[0], "--engine", takes_socks=False)
    chat_address(engine)


def _folders(
    models: Sequence[Model], out: Path | None, recipe: str, variants: Sequence[str], smoke: bool
) -> list[Path]:
    """Return the folder of each model's evaluation."""
    if out is not None:
        require_folder(out, f"--out {str(out)!r}")
        if len(models) == 1:
            return [out]
    parts = ["eval", Path(recipe).name, *variants, *(["smoke"] if smoke else [])]
    return [(out or Path("outputs") / "-".join(parts)) / name for name in names_of(models)]


def enter_recipe(plan: RunPlan) -> None:
    """Let this process know the platform and the modules that a recipe names, before it imports verl.

    Args:
        plan: The recipe.

    Raises:
        ConfigError: Its configuration cannot be composed.
    """
    os.environ.update(environment_of(plan, resolved(compose_run(plan))))
    if str(plan.root) not in sys.path:
        sys.path.insert(1, str(plan.root))


def evaluate_model(
    plan: RunPlan, model: EvaluatedModel, rows: tuple[Path, ...] | None, asked: EvalOptions, runs_code: bool | None
) -> bool:
    """Evaluate one model in the folder of a plan, and return whether each conversation has a score that counts.

    Args:
        plan: The recipe; its `out` is the folder of the evaluation.
        model: The model.
        rows: Files of rows; None: those of the recipe's validation.
        asked: The other options.
        runs_code: Whether the model's own Python files run; None: as in the recipe.

    Raises:
        MultiTurnError: See `verl_bridge.evaluate.command.evaluate`.
    """
    enter_recipe(plan)
    with RunFolder(plan.out).held(), Console(stderr=True).status("verl is imported") as status:
        try:
            from verl_multiturn.verl_bridge.offline.evaluate.command import evaluate
            from verl_multiturn.verl_bridge.offline.evaluate.settings import Job
        except ImportError as error:
            fail(f"an evaluation needs verl and SGLang ({error}); run it in the environment that trains", 2)
        origin = {} if asked.anyway else dict(model.origin)
        if asked.benchmark is not None:
            origin.pop("schemas", None)  # a benchmark has its own tools, or none
        job = Job(
            plan,
            model.folder,
            model.weights,
            model.named,
            None if rows is None else tuple(path.resolve() for path in rows),
            asked.only,
            asked.samples,
            asked.temperature,
            asked.engine,
            origin,
            runs_code,
            asked.benchmark,
        )
        return evaluate(job, say, status.update)
