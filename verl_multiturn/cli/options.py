"""Options that several commands share: a recipe's variants, its smoke run, and Hydra's overrides."""

from __future__ import annotations

from typing import Annotated

import typer

Variants = Annotated[list[str] | None, typer.Option("--variant", help="A variant, from `variant/*.yaml`; repeatable.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="As the recipe's smoke run, on a CPU.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE: one of Hydra's overrides; repeatable.")]
