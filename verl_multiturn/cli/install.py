"""`verl-multiturn install`: makes the environment of a run, from the locks of the wheel."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail
from verl_multiturn.install import EXTRAS, FLASH_ATTN_VERSION, InstallError, environments
from verl_multiturn.install import install as make_environment

_NAMES = "; ".join(
    f"{name}: {each.use} (Python {' or '.join(f'{a}.{b}' for a, b in each.pythons)}, {each.gb:g} GB)"
    for name, each in environments().items()
)


def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{_NAMES}.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the environment: new or empty.")],
    python: Annotated[
        str, typer.Option(metavar="PATH", help="The Python that makes it; one of a version that fits is looked for.")
    ] = "",
    extras: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME", help=f"Further packages: {', '.join(EXTRAS)}. Repeatable."),
    ] = None,
    flash_attn: Annotated[
        str | None,
        typer.Option(
            metavar="WHEEL",
            help=f"For gpu: a wheel of flash-attn {FLASH_ATTN_VERSION}, by path or address (else built: an hour).",
        ),
    ] = None,
    without_flash_attn: Annotated[
        bool, typer.Option("--without-flash-attn", help="For gpu: recipes then need --variant without_flash_attn.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Remove what this command made there with other versions, and begin anew.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Install over the environment that is there; its further packages stay.")
    ] = False,
) -> None:
    """Make an environment: Python, the packages of a lock, and this package as it is here.

    Packages come from pip's index, or UV_DEFAULT_INDEX. A second run of the command goes on after a failure, and does
    nothing where all is right.
    """
    if without_flash_attn and flash_attn is not None:
        fail("--flash-attn and --without-flash-attn exclude each other; leave one out", status=2)
    try:
        made = make_environment(
            name, folder, python, extras or [], "" if without_flash_attn else flash_attn, anew, repair
        )
    except InstallError as error:
        fail(str(error), status=error.status)
    print(f"{folder!r} {'is ready' if made else 'was right already'}: source {shlex.quote(f'{folder}/bin/activate')}")
