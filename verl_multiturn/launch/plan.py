"""What a command line of `verl-multiturn run` asks for, as the words of the trainer's own command line.

A recipe is a folder with a `config.yaml` on verl's configuration. The folders of its groups are in `hydra.searchpath`;
those that are relative lie under the folder that holds `recipes/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import is_in_wheel, shipped_folder

_FILE = "file://"
_PLAIN = re.compile(r"[A-Za-z0-9_/+.%*@?:\ -]*")


@dataclass(frozen=True)
class RunPlan:
    """A recipe with what was asked for.

    Attributes:
        folder: the folder of `config.yaml`.
        root: the folder that holds `recipes/` and `tool_configs/`.
        outputs: the folder in which runs have theirs.
        out: the folder of this run.
        name: the recipe's name, as its configuration says it.
        searched: where Hydra looks for groups, besides the recipe's own folder.
        variants: in their order.
        smoke: whether it is the small run on a CPU.
        data: a local file or a hub name in the place of the recipe's own data.
        seed: of the data's order, the mini-batches and the sampling; None leaves the recipe's.
        steps: training steps; None leaves the recipe's.
        overrides: Hydra's, as the user gave them; they come last and win.
    """

    folder: Path
    root: Path
    outputs: Path
    out: Path
    name: str
    searched: tuple[str, ...]
    variants: tuple[str, ...] = ()
    smoke: bool = False
    data: str | None = None
    seed: int | None = None
    steps: int | None = None
    overrides: tuple[str, ...] = ()

    def settings(self) -> list[str]:
        """Return Hydra's overrides, the user's last."""
        words = [f"recipe.root={self.root}"]
        if self.outputs != self.root / "outputs":
            words.append(f"recipe.outputs={self.outputs}")
        words.append(f"recipe.out={self.out}")
        if self.variants:
            words += [f"variant=[{','.join(self.variants)}]", f"trainer.experiment_name={run_name(self)}"]
        if self.smoke:
            words.append("smoke=cpu")
        if self.seed is not None:
            words += ["seed=given", f"recipe.seed={self.seed}"]
        if self.steps is not None:
            words.append(f"trainer.total_training_steps={self.steps}")
        return [*words, *self.overrides]

    def words(self) -> list[str]:
        """Return what the trainer is started with: the configuration, and Hydra's overrides."""
        return [
            "--config-path",
            str(self.folder),
            "--config-name",
            "config",
            searchpath(self.searched),
            *self.settings(),
        ]


def searchpath(folders: Sequence[str]) -> str:
    """Return the override that tells Hydra where groups are."""
    return "hydra.searchpath=[" + ",".join(f'"{folder}"' for folder in folders) + "]"


def run_name(launch: RunPlan) -> str:
    """Return the name of a run: that of the recipe, and those of its variants."""
    return "-".join([launch.name, *launch.variants])


def find_recipe(name: str) -> Path:
    """Return the folder of a recipe.

    Args:
        name: a recipe that comes with the package, or the path of a folder.

    Raises:
        ConfigError: there is no such recipe.
    """
    shipped = shipped_folder() / "recipes"
    for folder in (shipped / name, Path(name)):
        if (folder / "config.yaml").is_file():
            return Path(os.path.abspath(folder))
    known = ", ".join(sorted(path.parent.name for path in shipped.glob("*/config.yaml")))
    raise ConfigError(f"unknown recipe {name!r}; expected a folder with a config.yaml, or one of {known}")


def plan_launch(
    recipe: str,
    *,
    variants: Sequence[str] = (),
    smoke: bool = False,
    data: str | None = None,
    out: Path | None = None,
    seed: int | None = None,
    steps: int | None = None,
    overrides: Sequence[str] = (),
) -> RunPlan:
    """Return what is to be launched.

    Args:
        recipe: name or folder of the recipe.
        variants: names of variants; later ones win.
        smoke: whether the small run on a CPU is meant.
        data: a local file or a hub name in the place of the recipe's own data.
        out: folder of the run; by default `outputs/` and the names of the recipe and its variants.
        seed: of the run.
        steps: training steps.
        overrides: Hydra's. `variant=…` and `smoke=cpu` among them count as the options do.

    Raises:
        ConfigError: a word that cannot be meant so.
    """
    folder = find_recipe(recipe)
    primary = _read(folder)
    root = _root_of(folder)
    variants, smoke, overrides = _without_groups(variants, smoke, overrides)
    if smoke and data is not None:
        raise ConfigError(f"--smoke makes its own data; leave --data {data} out")
    searched = [_absolute(entry, root) for entry in primary["hydra"]["searchpath"]]
    _check_variants(variants, folder, searched)
    outputs = Path.cwd() / "outputs" if is_in_wheel(root) else root / "outputs"
    name = str(primary["recipe"]["name"])
    default = outputs / ("-".join([name, *variants]) + ("-smoke" if smoke else ""))
    out = Path(os.path.abspath(default if out is None else out))
    if not _PLAIN.fullmatch(f"{root}{outputs}{out}"):
        raise ConfigError(
            f"Hydra reads no folder named like {str(root)!r} or {str(out)!r}; expected letters of ASCII, digits, "
            "blanks and any of _ / + . % * @ ? : -"
        )
    return RunPlan(
        folder, root, outputs, out, name, tuple(searched), tuple(variants), smoke, data, seed, steps, tuple(overrides)
    )


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    primary = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        primary["recipe"]["name"], primary["hydra"]["searchpath"]
    except (KeyError, TypeError):
        raise ConfigError(f"{str(path)!r}: expected recipe.name and hydra.searchpath, as other recipes have") from None
    return dict(primary)


def _root_of(folder: Path) -> Path:
    """Return the folder that holds `recipes/`; a recipe may lie within another one's folder."""
    for parent in folder.parents:
        if parent.name == "recipes":
            return parent.parent
    raise ConfigError(
        f"{str(folder)!r} does not lie under a folder named 'recipes'; `verl-multiturn recipe copy` makes one"
    )


def _absolute(entry: str, root: Path) -> str:
    path = entry.removeprefix(_FILE)
    return f"{_FILE}{root / path}" if entry.startswith(_FILE) else entry


def _without_groups(
    variants: Sequence[str], smoke: bool, overrides: Sequence[str]
) -> tuple[list[str], bool, list[str]]:
    """Return variants, smoke and overrides, after `variant=…` and `smoke=cpu` were taken out of the overrides."""
    chosen, rest = list(variants), []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise ConfigError(f"unknown argument {word!r}; an override has the form key=value")
        if key == "variant":
            chosen += [name.strip() for name in value.strip("[]").split(",") if name.strip()]
        elif word == "smoke=cpu":
            smoke = True
        else:
            rest.append(word)
    return chosen, smoke, rest


def _check_variants(variants: Sequence[str], folder: Path, searched: Sequence[str]) -> None:
    folders = [folder, *(Path(entry.removeprefix(_FILE)) for entry in searched if entry.startswith(_FILE))]
    known = sorted(
        {path.name.removesuffix(".yaml") for place in folders for path in (place / "variant").glob("*.yaml")}
    )
    for variant in variants:
        if variant not in known:
            raise ConfigError(f"unknown variant {variant!r}; known are {' '.join(known)}")
