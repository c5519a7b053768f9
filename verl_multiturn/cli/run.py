"""The command `run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from verl_multiturn.cli.ends import refuse, wide_console
from verl_multiturn.cli.options import Variants
from verl_multiturn.cli.recipe import recipe_names
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.runs.environment import environment_of
from verl_multiturn.runs.plan import RunPlan, plan_run, run_name
from verl_multiturn.runs.progress import say
from verl_multiturn.runs.run import dry_start, run_recipe, shown_command
from verl_multiturn.runs.run_folder import OwnFiles


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Name, as `recipe list` shows it, or the path of a recipe's folder.", autocompletion=recipe_names
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hydra's overrides: key=value, +key=value, ++key=value, ~key; they come last. mt.KEY=value is a "
            "setting of ours (actor_rollout_ref.rollout.custom.multiturn.KEY)."
        ),
    ] = None,
    variants: Variants = None,
    mode: Annotated[
        str | None, typer.Option(help="verl's trainer mode: sync, colocate_async or separate_async.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model and made data, on a CPU, in minutes.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data's order, the mini-batches and the sampling.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (trainer.total_training_steps).")] = None,
    data: Annotated[
        str | None, typer.Option(help="A local file or folder, or a hub name, in the place of the recipe's own data.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of this run (outputs/NAME, beside the recipes).")] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the trainer's command, and start nothing.")
    ] = False,
    only_check: Annotated[
        bool,
        typer.Option("--check", help="Ask every start-up check, show what the run will be, and start nothing."),
    ] = False,
    only_prepare: Annotated[
        bool, typer.Option("--prepare", help="Write the data, and stop; with --check, check then.")
    ] = False,
) -> None:
    """Run a recipe: prepare its data, start verl's trainer, show its progress and sum it up.

    The last line is a JSON object.
    """
    try:
        plan = plan_run(
            recipe,
            variants=variants or [],
            mode=mode,
            smoke=smoke,
            data=data,
            out=out,
            seed=seed,
            steps=steps,
            overrides=overrides or [],
        )
        if only_print and (only_check or only_prepare):
            raise ConfigError("--print goes with neither --check nor --prepare; give one of them")
        if only_print:
            print(shown_command(plan, _before_print))
            return
        status = 0
        if only_prepare or not only_check:
            status = run_recipe(plan, only_prepare=only_prepare, check=refuse_early)
        if only_check and not status:
            status = _check(plan)
    except MultiTurnError as error:
        refuse(error)
    if status:
        raise typer.Exit(status)


def _check(plan: RunPlan) -> int:
    """Run all start-up checks of a run, show its plan, and return the exit status."""
    say("asking the start-up checks; verl is imported, which takes a minute")
    status, printed, errors = dry_start(plan, refuse_early)
    told = _warnings(errors)
    if status:
        begin = max(errors.rfind("verl-multiturn: "), 0) if status == 2 else 0
        print(errors[begin:].strip(), file=sys.stderr)
        if status == 2 and f"{plan.out}/data" in errors[begin:]:
            print("verl-multiturn: the run makes this file itself; --prepare --check makes it first", file=sys.stderr)
        return status if status in (1, 2) else 1
    facts = json.loads(printed.strip().splitlines()[-1])
    from verl_multiturn.verl_bridge.startup.plan_table import lines_of

    table = Table(title=f"{run_name(plan)}: the start would be accepted", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in lines_of(facts).items():
        table.add_row(title, escape(text))
    console = wide_console()
    for line in told:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    print(json.dumps({"recipe": plan.name, "out": str(plan.out), **facts}))
    return 0


def _warnings(errors: str) -> list[str]:
    """Return the lines of our warnings among others: the headlines, and their items, which are indented."""
    found: list[str] = []
    is_ours = False
    for line in errors.splitlines():
        is_ours = line.startswith("verl-multiturn: ") or (is_ours and line.startswith("  - "))
        if is_ours:
            found.append(line)
    return found


def _before_print(plan: RunPlan, config: Any, own_files: OwnFiles) -> None:
    """Refuse as `refuse_early` does for a run on any machine; report a setting that the next version refuses."""
    refuse_early(plan, config, own_files, is_here=False)
    from verl_multiturn.verl_bridge.startup.refusals.loops import tell_of_history
    from verl_multiturn.verl_bridge.startup.view import RunView

    tell_of_history(RunView(config))


def refuse_early(plan: RunPlan, config: Any, own_files: OwnFiles, is_here: bool = True) -> None:
    """Refuse all that can be refused without importing verl, in the trainer's process after a minute.

    Args:
        plan: The planned run.
        config: Its composed configuration, as `compose_run` returns it.
        own_files: Whether the run has made the files in its own folder.
        is_here: Whether it will run on this machine; a command that is printed may be for another.

    Raises:
        ConfigError: The run cannot work.
    """
    from verl_multiturn.verl_bridge.startup.configuration import check_early

    is_on_cpu = environment_of(plan, config).get("VERL_PLATFORM", "").strip().lower() == "cpu"
    check_early(config, is_on_cpu=is_on_cpu, is_here=is_here, own_files=own_files)
