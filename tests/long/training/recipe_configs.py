"""Every recipe's full GPU configuration, composed by Hydra and checked by verl's checks and ours.

It also checks that it trains for as many steps as its curve takes.

    python -m benchmarks.recipe_configs [--short]

For each recipe: as it is, with each variant of its own, and with each shared variant on top (`--short`: on top of the
first recipe alone, and `megatron` where several GPUs hold a row). A row may be as long as the run's limit: a
micro-batch that does not take it is a fault. The smoke run of each (`--short`: of each recipe as it is) is composed,
and not checked. Nothing is started. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.long.training.recipe_steps import count_steps
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs import imports
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.imports import Code
from verl_multiturn.runs.plan import plan_run

# A configuration for GPUs must not get the defaults that a CPU needs.
os.environ["VERL_PLATFORM"] = "nvidia"

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "recipes"
COMMON = RECIPES / "common" / "config" / "variant"
# The box that the recipes are for has as many CPUs as verl reserves, and the models; this machine need not. (verl reads
# the critic's when it checks its settings.)
BOX = ["ray_kwargs.ray_init.num_cpus=1024", f"critic.model.path={RECIPES / 'common' / 'model'}"]
# Recipes that train a tiny model of their own, on a CPU.
TINY = {"quickstart", "ask_first", "errands", "frozen_lake", "proxy_quickstart", "repair"}
# A recipe's training data has to be recorded first, so its number of steps is not known.
RECORDED = {"from_records"}
# Its program starts another recipe in each round, and its configuration is none of verl's.
ROUNDS = {"closed_loop"}
# Folders of databases that users download, relative to where they start a recipe. Its tools look for them.
DATABASES = ["data/omnisql"]


def recipes() -> list[str]:
    """Return the names of the recipes, apart from those without a curve of others that they should reach."""
    names = [path.parent.name for path in sorted(RECIPES.glob("*/config.yaml"))]
    return [name for name in names if name not in TINY | RECORDED | ROUNDS]


def is_for_gpus(config: Any) -> bool:
    """Return whether a recipe's full run is one on GPUs."""
    return not config.recipe.on_cpu


def cases(short: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each recipe with the variants that are checked."""
    shared = _names(COMMON)
    for number, recipe in enumerate(recipes()):
        own = _names(RECIPES / recipe / "variant")
        further = [] if recipe == "smollm2" else [name for name in shared if name not in own]
        yield recipe, []
        is_split = (RECIPES / recipe / "ulysses").is_dir()  # several GPUs hold a row, under another engine, too
        if number and short:
            further = ["megatron"] if is_split else []
        for variant in [*own, *further]:
            yield recipe, [variant]
            if variant not in shared and is_split and not short:
                yield recipe, [variant, "megatron"]


def _names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in folder.glob("*.yaml"))


def composed(recipe: str, variants: list[str], *overrides: str) -> Any:
    """Return the configuration that `verl-multiturn run` starts verl's trainer with."""
    return compose_run(plan_run(recipe, variants=variants, overrides=overrides))


_import_problems: dict[Any, str] = {}


def import_problem(codes: Sequence[Code], variables: Mapping[str, str]) -> str:
    """Import pieces of code in a process of its own, once for the variants of a recipe that name the same ones."""
    key = (tuple(codes), tuple(sorted(variables.items())))
    if key not in _import_problems:
        _import_problems[key] = imports.import_problem(codes, variables)
    return _import_problems[key]


def judge(config: Any) -> None:
    """Run verl's checks and ours on a configuration; raise their errors."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from verl_multiturn.verl_bridge.startup import own_code
    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    # The Pythons of Harbor and verifiers, their harnesses and the accounts of clouds are the box's.
    proxy = OmegaConf.select(config, "actor_rollout_ref.rollout.custom.multiturn.proxy")
    if proxy is not None and proxy.get("python") is not None:
        proxy.python = sys.executable
    with (
        mock.patch.object(own_code, "import_problem", import_problem),
        mock.patch("verl_multiturn.harnesses.runners.check_harbor"),
        mock.patch("verl_multiturn.harnesses.runners.check_verifiers"),
        contextlib.redirect_stderr(told := io.StringIO()),
    ):
        prepare_config(config)
    print(told.getvalue(), end="", file=sys.stderr)
    if too_long := [line for line in told.getvalue().splitlines() if "a row may have" in line]:
        raise ConfigError(too_long[0])
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


def verdict(recipe: str, variants: list[str], smoke: bool) -> int:
    """Print the verdict on a recipe, and with `smoke` on its smoke run.

    Returns:
        The steps that it trains for, 0 when it failed.
    """
    name = "+".join([recipe, *variants])
    try:
        config = composed(recipe, variants, *BOX)
        steps = count_steps(config, recipe, variants)
        if smoke:
            resolved(compose_run(plan_run(recipe, variants=variants, smoke=True)))
        if is_for_gpus(config):
            with contextlib.redirect_stdout(io.StringIO()):  # verl's checks print
                judge(config)
        problem = steps.complaint((RECIPES / recipe / "README.md").read_text(encoding="utf-8"))
    except Exception as error:  # an error of any check is a verdict
        problem = f"{type(error).__name__}: {error}"
    if problem:
        print(f"no  {name}: {problem}")
        return 0
    print(f"ok  {name}: {steps.trained} steps, {steps.needed} needed, {steps.warm_up} of warm-up")
    return steps.trained


def run(short: bool) -> dict[str, Any]:
    """Judge the configurations, and return the figures.

    Args:
        short: The shared variants on top of one recipe alone.
    """
    judged = list(cases(short))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for needed in DATABASES:
            Path(needed).mkdir(parents=True)
        steps = {
            "+".join([recipe, *variants]): verdict(recipe, variants, smoke=not short or not variants)
            for recipe, variants in judged
        }
    failed = [name for name, count in steps.items() if not count]
    variants = len(judged) - len(recipes())
    return {"recipes": len(recipes()), "variants": variants, "failed": failed, "steps": steps}
