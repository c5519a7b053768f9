"""`verl-multiturn recipe`: lists the recipes, copies one, or makes one of the user's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.cli.ends import refuse
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.recipes import copy_recipe, installed_recipes, list_recipes, make_recipe

recipes_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Recipes: list them, copy one to change it, or make your own."
)


def recipe_names(incomplete: str) -> list[str]:
    """Return the names of recipes that begin so, for the shell's completion."""
    try:
        return [name for name in (*list_recipes(), *installed_recipes()) if name.startswith(incomplete)]
    except MultiTurnError:
        return []


@recipes_app.command("list")
def list_them() -> None:
    """List the recipes that come with this package, and those of installed packages with their package and version."""
    try:
        recipes = list_recipes() | installed_recipes()
    except MultiTurnError as error:
        refuse(error)
    table = Table(show_header=False, box=None)
    for name, title in recipes.items():
        table.add_row(escape(name), escape(title))
    Console().print(table)


@recipes_app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="Name, as `recipe list` shows it.", autocompletion=recipe_names)],
    folder: Annotated[Path, typer.Argument(help="Where recipes/ and tool_configs/ are made.")],
) -> None:
    """Copy a recipe into a folder of yours, to run and to change, with the files that its own files name.

    Files that are there already stay as they are.
    """
    try:
        copied = copy_recipe(name, folder)
    except MultiTurnError as error:
        refuse(error)
    _announce(copied)


@recipes_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the recipe and of its Python package, such as my_task.")],
    folder: Annotated[Path, typer.Argument(help="Where recipes/NAME is made.")] = Path(),
) -> None:
    """Make a recipe of your own that runs: a tool, rows, a reward, a configuration and a test, to change."""
    try:
        made = make_recipe(name, folder)
    except MultiTurnError as error:
        refuse(error)
    _announce(made)


def _announce(folder: Path) -> None:
    """Print where a recipe is, and how it is run."""
    command = f"bash {shlex.quote(str(folder / 'run.sh'))} [--smoke] …"
    Console().print(
        f"[green]ok[/] {escape(str(folder))}: {escape(command)}; {escape(str(folder / 'README.md'))} says more",
        highlight=False,
        soft_wrap=True,
    )
