"""The rule for the folders of runs, models and records, and the words in which commands refuse.

Records, weights and tokenizers are data. Code, commands, addresses and environment variables that a folder names are
not used without `--trust`, unless the folder is the user's own: it lies below the `outputs/` into which runs of this
checkout write, or those of the recipe that the user names, and belongs to this user. That recipe's code runs anyway.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import outputs_of, shipped_folder

TRUST_HELP = (
    "Also use what the folder names, as if it were a program of yours: import its code, start its commands, open its "
    "paths and addresses with your variables, and run the model's own Python files."
)
MODEL_CODE_HELP = "Run the Python files that come with the model."
TOOLS_HELP = "A tools YAML of yours, in the place of the folder's; its classes are imported and its commands started."
_CONFIGURATION = (".run.json", "hydra/.hydra/*.yaml", "run-*.json", "records/run-*.json")
"""Files of a run's folder, and of a folder of records, that name code and addresses."""
_MOST_SHOWN = 6


@dataclass(frozen=True)
class UserFiles:
    """Hold the files that a user gives in the place of those that a folder names.

    Attributes:
        model_code: Whether the Python files that come with the model may run.
        tools: A tools YAML.
        base: Folder of the model that the training began with.
    """

    model_code: bool = False
    tools: Path | None = None
    base: Path | None = None


NOTHING_GIVEN = UserFiles()


def own_outputs() -> Path | None:
    """Return the folder into which runs write by default; None: this package has no recipes beside it.

    In a checkout it lies beside the recipes; the recipes of a wheel write into the current folder's `outputs/`.
    """
    try:
        root = shipped_folder()
    except ConfigError:
        return None
    return _with_links_followed(outputs_of(root))


def is_own(folder: Path, recipes_outputs: Path | None = None) -> bool:
    """Return whether a folder is one of this user's own runs, or lies in one: links are followed first.

    Args:
        folder: Folder of a run, a checkpoint, a model or records; or a file in one.
        recipes_outputs: Folder below which `run` puts the runs of the recipe that the user names
            (`plan.chosen_outputs`); None: the command has no recipe.
    """
    return any(_is_own(folder, outputs) for outputs in _places(recipes_outputs))


def _places(recipes_outputs: Path | None) -> list[Path]:
    """Return the folders below which the user's own runs are."""
    named = None if recipes_outputs is None else _with_links_followed(recipes_outputs)
    return list(dict.fromkeys(place for place in (own_outputs(), named) if place is not None))


def _with_links_followed(outputs: Path) -> Path:
    """Return a folder of runs with the links above it followed; one that is a link itself stays one."""
    return outputs.parent.resolve() / outputs.name


def _is_own(folder: Path, outputs: Path) -> bool:
    try:
        place = folder.resolve(strict=True)
        if outputs.is_symlink() or not place.is_relative_to(outputs) or place == outputs:
            return False
        above = [place, *(each for each in place.parents if each.is_relative_to(outputs))]
        named = [path for each in above if each != outputs and each.is_dir() for path in _configuration(each)]
        return all(_is_of_this_user(path, outputs) for path in [*above, *named])
    except (OSError, RuntimeError):  # a link to itself
        return False


def _configuration(folder: Path) -> Iterator[Path]:
    for pattern in _CONFIGURATION:
        yield from folder.glob(pattern)


def _is_of_this_user(path: Path, outputs: Path) -> bool:
    whole = path.resolve(strict=True)
    return whole.is_relative_to(outputs) and whole.stat().st_uid == os.getuid()


def import_from_here(*folders: Path, is_trusted: bool = True) -> None:
    """Let later imports be found in the current folder, as with `python -m`.

    Args:
        folders: Folders of models and runs that a command opens. Where the current folder is one of them, lies in one,
            or is a run that has one, and is not the user's own, nothing is imported from it.
        is_trusted: Whether the user gave `--trust`.
    """
    here = Path.cwd().resolve()
    places = [folder.resolve() for folder in folders]
    is_theirs = any(here.is_relative_to(place) for place in places)
    is_theirs |= any(place.is_relative_to(here) for place in places) and any(_configuration(here))
    if is_trusted or not is_theirs or is_own(here):
        sys.path.insert(0, str(here))


def require_trust(
    folder: Path, command: str, uses: Sequence[str], is_trusted: bool, recipes_outputs: Path | None = None
) -> None:
    """Refuse a folder of somebody else of which a command would use more than data.

    Args:
        folder: The folder, as the user named it.
        command: Name of the command.
        uses: The things that it would start, import or open, a few words each, such as `the command 'sh'`.
        is_trusted: Whether the user gave `--trust`.
        recipes_outputs: As for `is_own`.

    Raises:
        ConfigError: The folder is not the user's own, and not trusted.
    """
    if is_trusted or is_own(folder, recipes_outputs):
        return
    more = f" and {len(uses) - _MOST_SHOWN} more" if len(uses) > _MOST_SHOWN else ""
    places = " or ".join(repr(str(place)) for place in _places(recipes_outputs))
    own = f"a run of yours below {places}" if places else "a run of yours"
    raise ConfigError(
        f"{show(str(folder))} is not {own}, and {command} would use what it names: "
        f"{', '.join(uses[:_MOST_SHOWN])}{more}; look at these, and say --trust if it is a run of your own that lies "
        "elsewhere, or if you would run a program of its author"
    )
