"""The plan of a run: the options of `verl-multiturn run`, translated into the trainer's own command line.

A recipe is a folder with a `config.yaml` that builds on verl's configuration. Its `hydra.searchpath` lists the folders
of its configuration groups. A relative folder in that list is below the folder that contains `recipes/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.config import PATH
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import installed_folder, installed_recipes, outputs_of, root_of, shipped_folder
from verl_multiturn.runs.data import check_seed
from verl_multiturn.runs.run_folder import require_folder

MODES = ("sync", "colocate_async", "separate_async")
"""Trainer modes of verl, each with a file in `recipes/common/config/mode`."""

SHORT = "mt"
"""Short form of the path of our settings in an override."""

_FILE = "file://"
# Settings that an option sets, so that nothing else should.
_SETS = {
    "trainer.v1.trainer_mode": "--mode",
    "trainer.total_training_steps": "--steps",
    "recipe.seed": "--seed",
    "recipe.out": "--out",
}
_READABLE = re.compile(r"[A-Za-z0-9_/+.%*@?:|$~,()\[\]{}'\"\\ \t-]*")
"""Characters that Hydra reads in a value without quotes."""
_NESTED = re.compile(r"\$\{[^}]*\$\{")
"""A reference within a reference, such as `${oc.decode:${oc.env:SIZE}}`, which Hydra reads in quotes alone."""
_LIST = re.compile(r"\[([^\[\]{}'\"]*)\]")
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")
_PLAIN = re.compile(r"[A-Za-z0-9_/+.%*@?:\ -]*")


@dataclass(frozen=True)
class RunPlan:
    """A recipe with the options that the user gave.

    Attributes:
        folder: Folder of `config.yaml`.
        root: Folder that contains `recipes/` and `tool_configs/`.
        outputs: Folder that contains the folders of all runs.
        out: Folder of this run.
        name: The recipe's name, `recipe.name` in its configuration.
        searched: Places where Hydra looks for configuration groups, besides the recipe's own folder.
        variants: Names of the variants in the order given; later ones win.
        mode: verl's trainer mode, one of `MODES`; None: the recipe's own.
        smoke: Whether this is the small run on a CPU (`--smoke`).
        data: Local file or hub name that replaces the recipe's own data; None: the recipe's own.
        seed: Seed of the order of the data, the mini-batches and the sampling; None: the recipe's own.
        steps: Number of training steps; None: the recipe's own.
        overrides: Hydra overrides (`key=value`) as the user gave them. They come last and win.
    """

    folder: Path
    root: Path
    outputs: Path
    out: Path
    name: str
    searched: tuple[str, ...]
    variants: tuple[str, ...] = ()
    mode: str | None = None
    smoke: bool = False
    data: str | None = None
    seed: int | None = None
    steps: int | None = None
    overrides: tuple[str, ...] = ()

    def settings(self) -> list[str]:
        """Return all Hydra overrides (`key=value`) of the run, with the user's own at the end."""
        words = [f"recipe.root={self.root}"]
        if self.outputs != self.root / "outputs":
            words.append(f"recipe.outputs={self.outputs}")
        words.append(f"recipe.out={self.out}")
        if self.variants:
            words.append(f"variant=[{','.join(self.variants)}]")
        if self.mode is not None:
            words.append(f"+mode={self.mode}")
        if run_name(self) != self.name:
            words.append(f"trainer.experiment_name={run_name(self)}")
        if self.smoke:
            words.append("smoke=cpu")
        if self.seed is not None:
            words += ["seed=given", f"recipe.seed={self.seed}"]
        if self.steps is not None:
            words.append(f"trainer.total_training_steps={self.steps}")
        return [*words, *self.overrides]

    def words(self) -> list[str]:
        """Return the arguments of the trainer's command: where its configuration is, and the Hydra overrides."""
        return [
            "--config-path",
            str(self.folder),
            "--config-name",
            "config",
            searchpath(self.searched),
            *self.settings(),
        ]


def searchpath(folders: Sequence[str]) -> str:
    """Return the Hydra override that names the folders of configuration groups.

    Example: `hydra.searchpath=["file:///a","pkg://verl.trainer.config"]`.

    Args:
        folders: Folders in Hydra's notation, for example `file:///a`.
    """
    return "hydra.searchpath=[" + ",".join(f'"{folder}"' for folder in folders) + "]"


def run_name(plan: RunPlan) -> str:
    """Return the name of a run: the names of the recipe, its variants and its trainer mode, joined by `-`."""
    return "-".join([plan.name, *plan.variants, *([plan.mode] if plan.mode is not None else [])])


def find_recipe(name: str) -> Path:
    """Return the folder of a recipe as an absolute path.

    Args:
        name: Name of a recipe that comes with the package, the reference of an installed package's recipe, or path of
            a folder with a `config.yaml`. A text that begins with a dot or a slash is a path. Any other text is a name
            if there is such a recipe.

    Raises:
        ConfigError: There is no such recipe.
    """
    shipped = shipped_folder() / "recipes"
    if (installed := installed_folder(name)) is not None:
        return installed
    for folder in (Path(name),) if name.startswith((".", "/")) else (shipped / name, Path(name)):
        if (folder / "config.yaml").is_file():
            return Path(os.path.abspath(folder))
    known = [*sorted(path.parent.name for path in shipped.glob("*/config.yaml")), *installed_recipes()]
    own = Path("recipes") / name
    hint = f"did you mean {str(own)!r}?" if (own / "config.yaml").is_file() else did_you_mean(name, known)
    raise ConfigError(
        f"unknown recipe {name!r}; {hint and hint + ' '}expected a folder with a config.yaml, or one of "
        f"{', '.join(known)}"
    )


def chosen_outputs(recipe: str) -> Path:
    """Return the folder below which `run` puts the runs of a recipe where no `--out` is given.

    Args:
        recipe: Name or folder of the recipe.

    Raises:
        ConfigError: There is no such recipe, or it is not below a folder `recipes`.
    """
    return _outputs(recipe, find_recipe(recipe))


def _outputs(recipe: str, folder: Path) -> Path:
    """Return the folder for a recipe's runs: for an installed package's a current one, since its own is not written."""
    return Path.cwd() / "outputs" if installed_folder(recipe) == folder else outputs_of(root_of(folder))


def plan_run(
    recipe: str,
    *,
    variants: Sequence[str] = (),
    mode: str | None = None,
    smoke: bool = False,
    data: str | None = None,
    out: Path | None = None,
    seed: int | None = None,
    steps: int | None = None,
    overrides: Sequence[str] = (),
) -> RunPlan:
    """Check the options of a run, and return its plan.

    Args:
        recipe: Name or folder of the recipe.
        variants: Names of variants; later ones win.
        mode: verl's trainer mode, one of `MODES`; None: the recipe's own.
        smoke: Whether to do the small run on a CPU.
        data: Local file or hub name that replaces the recipe's own data; None: the recipe's own.
        out: Folder of the run, other than the current one; None: a folder below `outputs/`, named after the recipe, its
            variants, `mode` and `smoke`.
        seed: Seed of the run; None: the recipe's own.
        steps: Number of training steps; None: the recipe's own.
        overrides: Hydra overrides, `key=value`. `variant=…` and `smoke=cpu` among them work like the options. A setting
            of ours needs no plus, and may be written in short, `mt.KEY=value`.

    Raises:
        ConfigError: The recipe, a variant or the mode is unknown, the recipe's `config.yaml` has no name or search path
            or is not below a folder `recipes`, an override is not `key=value` or contradicts an option, the seed cannot
            be used, `data` is given for a smoke run, or a folder's name has characters that Hydra cannot read.
    """
    folder = find_recipe(recipe)
    primary = _read(folder)
    root = root_of(folder)
    variants, smoke, overrides = without_groups(variants, smoke, list(map(in_full, overrides)))
    if out is not None and not str(out).strip(" ."):
        raise ConfigError(f"--out {str(out)!r}: expected a folder for this run alone, which the current one is not")
    if smoke and data is not None:
        raise ConfigError(f"--data {data!r} cannot be used with --smoke, which makes its own data; leave one out")
    if out is not None:
        require_folder(out, f"--out {str(out)!r}")
    if seed is not None:
        check_seed(seed, f"--seed {seed}")
    _check_contradictions({"--mode": mode, "--seed": seed, "--steps": steps, "--out": out}, overrides)
    searched = [_absolute(entry, root) for entry in primary["hydra"]["searchpath"]]
    _check_variants(variants, folder, searched)
    if mode is not None and mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}; {_hint(mode, MODES)}known are {', '.join(MODES)}")
    if mode is not None and not _has_mode(mode, folder, searched):
        raise ConfigError(
            f"--mode {mode}: {str(folder / 'config.yaml')!r} does not find mode/{mode}.yaml, so that it would have no "
            "effect; leave it out, or add file://recipes/common/config to hydra.searchpath. A trainer for SFT has no "
            "modes"
        )
    outputs = _outputs(recipe, folder)
    name = str(primary["recipe"]["name"])
    parts = [name, *variants, *([mode] if mode is not None else []), *(["smoke"] if smoke else [])]
    default = outputs / "-".join(parts)
    out = Path(os.path.abspath(default if out is None else out))
    for place, remedy in ((root, "move the recipes"), (out, "choose another --out")):
        if not _PLAIN.fullmatch(str(place)) or str(place).endswith(" "):
            raise ConfigError(
                f"the folder {str(place)!r} cannot be used, since Hydra reads only letters of ASCII, digits, blanks "
                f"(not at the end) and any of _ / + . % * @ ? : - in a path; {remedy}"
            )
    return RunPlan(
        folder,
        root,
        outputs,
        out,
        name,
        tuple(searched),
        tuple(variants),
        mode,
        smoke,
        data,
        seed,
        steps,
        tuple(map(quoted, overrides)),
    )


def quoted(word: str) -> str:
    """Return a Hydra override whose value Hydra can read: one that it could not is put into quotes.

    Example: `data.train_files=/数据/a=b` returns `data.train_files='/数据/a=b'`. Of a list each item is looked at.
    An item with quotes, a mapping or a list in a list stays as it is.
    """
    key, equals, value = word.partition("=")
    if not equals or _is_readable(value):
        return word
    if (found := _LIST.fullmatch(value)) is not None:
        return f"{key}=[{','.join(_in_quotes(item.strip()) for item in found[1].split(','))}]"
    return word if value.lstrip().startswith(("'", '"', "{", "[")) else f"{key}={_in_quotes(value)}"


def _is_readable(value: str) -> bool:
    return _READABLE.fullmatch(value) is not None and _NESTED.search(value) is None


def _in_quotes(value: str) -> str:
    if _is_readable(value):
        return value
    # A backslash counts as itself, unless a quote comes after it.
    escaped = _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    primary = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        primary["recipe"]["name"], primary["hydra"]["searchpath"]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{str(path)!r}: recipe.name or hydra.searchpath is missing; copy both from another recipe"
        ) from None
    return dict(primary)


def _absolute(entry: str, root: Path) -> str:
    path = entry.removeprefix(_FILE)
    return f"{_FILE}{root / path}" if entry.startswith(_FILE) else entry


def in_full(word: str) -> str:
    """Return an override as Hydra takes it: a setting of ours with its whole path and the plus that it needs.

    Example: `mt.tool_reward.mode=add` is `++actor_rollout_ref.rollout.custom.multiturn.tool_reward.mode=add`.

    Args:
        word: An override; one of another setting stays as it is. A mapping below
            `custom.multiturn` gets no plus.
    """
    key, equals, value = word.partition("=")
    name = key.strip().lstrip("+~")
    if name == SHORT or name.startswith(f"{SHORT}."):
        name = PATH + name.removeprefix(SHORT)
    elif name != PATH and not name.startswith(f"{PATH}."):
        return word
    if name != PATH and value.strip().startswith("{") and not key.strip().startswith(("+", "~")):
        return f"{name}{equals}{value}"  # with a plus, Hydra would put the mapping into the one that is there
    return f"{'~' if key.strip().startswith('~') else '++'}{name}{equals}{value}"


def without_groups(variants: Sequence[str], smoke: bool, overrides: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Move `variant=…` and `smoke=cpu` out of the overrides; return variants, smoke and the other overrides."""
    chosen, rest = list(variants), []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise ConfigError(f"unknown argument {word!r}; an override has the form key=value")
        if key == "variant":
            chosen += [name.strip() for name in value.strip("[]").split(",") if name.strip()]
        elif key.strip() == "smoke":
            if value.strip(" '\"") != "cpu":
                raise ConfigError(f"{word!r}: the smoke run is on a CPU; expected smoke=cpu, or --smoke")
            smoke = True
        else:
            rest.append(word)
    return list(dict.fromkeys(chosen)), smoke, rest


def _check_contradictions(options: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse an override that contradicts an option: a run would be named after one and follow the other."""
    for word in overrides:
        key, _, value = word.partition("=")
        option = _SETS.get(key.strip().lstrip("+"))
        given = None if option is None else options[option]
        if given is None:
            continue
        value = value.strip(" '\"")
        same = os.path.abspath(value) == os.path.abspath(given) if option == "--out" else value == str(given)
        if not same:
            shown = given if isinstance(given, int) else repr(str(given))
            raise ConfigError(f"{option} {shown} and {word!r} contradict each other; leave one of them out")


def _has_mode(mode: str, folder: Path, searched: Sequence[str]) -> bool:
    """Return whether Hydra finds the file of a mode. It takes `+mode=…` for a key of the user's own otherwise."""
    return any((place / "mode" / f"{mode}.yaml").is_file() for place in _folders(folder, searched))


def _folders(folder: Path, searched: Sequence[str]) -> list[Path]:
    """Return the folders of configuration groups: the recipe's own, and those that it names."""
    return [folder, *(Path(entry.removeprefix(_FILE)) for entry in searched if entry.startswith(_FILE))]


def _check_variants(variants: Sequence[str], folder: Path, searched: Sequence[str]) -> None:
    folders = _folders(folder, searched)
    known = sorted(
        {path.name.removesuffix(".yaml") for place in folders for path in (place / "variant").glob("*.yaml")}
    )
    for variant in variants:
        if variant not in known:
            raise ConfigError(f"unknown variant {variant!r}; {_hint(variant, known)}known are {', '.join(known)}")


def _hint(given: str, known: Sequence[str]) -> str:
    hint = did_you_mean(given, known)
    return f"{hint} " if hint else ""
