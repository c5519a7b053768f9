"""`verl-multiturn probe`: an evaluation with a verdict, before a model is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli.ends import fail, refuse, wide_console
from verl_multiturn.cli.eval import EvalOptions, check_engine, evaluate_model
from verl_multiturn.cli.options import Changes, Smoke, Variants
from verl_multiturn.errors import ConfigError, EngineError, MultiTurnError
from verl_multiturn.evaluation.chat_address import chat_address
from verl_multiturn.evaluation.probe import ProbeAdvice, probe_summary, probe_table
from verl_multiturn.evaluation.probe import probe as probe_results
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.models.evaluation_model import evaluated, names_of, require_trusted, rows_of_run, runs_model_code
from verl_multiturn.models.export import ExportError
from verl_multiturn.models.location import Model, find_model
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import RunPlan, chosen_outputs, plan_run
from verl_multiturn.runs.processes import interruptible
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.run import run_recipe
from verl_multiturn.runs.run_folder import require_folder
from verl_multiturn.runs.setting_differences import setting_differences
from verl_multiturn.trust.rule import MODEL_CODE_HELP, TRUST_HELP, import_from_here

_ROWS = "data.train_files"
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def probe(
    named: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint of verl, or a Hugging Face folder.")
    ],
    recipe: Annotated[str, typer.Option(help="Name, as `recipe list` shows it, or the path of a recipe's folder.")],
    variants: Variants = None,
    smoke: Smoke = False,
    changes: Changes = None,
    only: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only the rows of this data source.")] = None,
    rows: Annotated[
        list[Path] | None, typer.Option("--rows", help="A file of rows in the place of the recipe's training rows.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most rows; they are drawn by data.seed.")] = 64,
    samples: Annotated[int | None, typer.Option(min=2, help="Conversations of each row, else rollout.n.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Temperature of the sampling, else rollout.temperature.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="sglang, started here; or the address of SGLang, or of an endpoint that ends in /v1.")
    ] = "sglang",
    out: Annotated[Path | None, typer.Option(help="Folder of the evaluation; where one is, it goes on.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also with another template, tokenizer or tools than the model's run had.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST_HELP)] = False,
    model_code: Annotated[bool, typer.Option("--trust-remote-code", help=MODEL_CODE_HELP)] = False,
) -> None:
    """Say whether reinforcement learning can begin with a model, by its conversations on a recipe's training rows.

    They are sampled as the training samples. The verdict is one of go, warm-start, easier rows, harder rows and nothing
    left to learn; the exit status is 0 for go, and 1 for the others. The last line is a JSON object.
    """
    try:
        check_engine(engine)
        if chat_address(engine) is not None:
            raise ConfigError(
                f"--engine {engine!r}: a model behind chat completions is not trained here; evaluate it with eval, or "
                "name the engine of the model that is to be trained"
            )
        usable = require_trusted("probe", named, trust, chosen_outputs(recipe))
        import_from_here(named, is_trusted=trust)
        model = find_model(named, is_trusted=usable)
        folder = _folder(model, out, recipe, variants or [], smoke)
        asked: dict[str, Any] = {"variants": variants or [], "smoke": smoke, "out": folder}
        plan = plan_run(recipe, **asked, overrides=changes or [])
        # The probe samples as the training, whatever `val_kwargs` has.
        if difference := setting_differences(model, plan, ("n", "temperature", "do_sample", "top_p", "top_k")):
            say(difference)
        rollout = _rollout(plan)
        words = [f"{_VALIDATION}.{key}={rollout[key]}" for key in ("top_p", "top_k")]
        plan = plan_run(recipe, **asked, overrides=[f"data.val_max_samples={limit}", *words, *(changes or [])])
        with interruptible():
            own = tuple(rows) if rows else rows_of_run(model, _ROWS)
            if own is None:
                if status := run_recipe(plan, only_prepare=True):
                    raise typer.Exit(status)
                listed = resolved(compose_run(plan))["data"]["train_files"]
                own = tuple(Path(path) for path in ([listed] if isinstance(listed, str) else listed))
            drawn = EvalOptions(
                only,
                samples or int(rollout["n"]),
                float(rollout["temperature"]) if temperature is None else temperature,
                engine,
                anyway,
            )
            runs_code = runs_model_code(model, trust, model_code)
            evaluate_model(plan, evaluated(str(named), model, plan.out, say, runs_code), own, drawn, runs_code)
        results = read_results(plan.out)
        found = probe_results(results)
    except KeyboardInterrupt:
        fail("interrupted; what has ended is kept, and the same command goes on", 130)
    except (EngineError, ExportError) as error:
        fail(str(error))
    except MultiTurnError as error:
        refuse(error)
    wide_console().print(probe_table(results, found), highlight=False)
    print(json.dumps(probe_summary(results, found)))
    if found.verdict is not ProbeAdvice.GO:
        raise typer.Exit(1)


def _folder(model: Model, out: Path | None, recipe: str, variants: list[str], smoke: bool) -> Path:
    if out is not None:
        require_folder(out, f"--out {str(out)!r}")
        return out
    parts = ["probe", Path(recipe).name, *variants, *(["smoke"] if smoke else [])]
    return Path("outputs") / "-".join(parts) / names_of([model])[0]


def _rollout(plan: RunPlan) -> dict[str, Any]:
    """Return how the recipe's training samples."""
    return dict(resolved(compose_run(plan))["actor_rollout_ref"]["rollout"])
