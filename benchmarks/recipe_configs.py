"""Every recipe's full GPU configuration, composed by Hydra and checked by verl's checks and ours.

    python -m benchmarks.recipe_configs [--short]

It also checks whether each recipe trains for as many steps as its curve takes.

Each recipe is composed as it is, with each of its own variants, and with each shared variant on top. (With `--short`,
the shared variants are put on top of the first recipe alone.) Nothing is started. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recipe_steps import count_steps

# A configuration for GPUs must not get the defaults that a CPU needs.
os.environ["VERL_PLATFORM"] = "nvidia"

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
COMMON = RECIPES / "common" / "variants"
# The machine that the recipes are meant for has as many CPUs as verl reserves, and the models; this machine need not
# have them. (verl reads the critic's model when it checks its settings.)
BOX = ["ray_kwargs.ray_init.num_cpus=1024", f"critic.model.path={RECIPES / 'common' / 'model'}"]
# Folders of databases that users download, relative to where they start a recipe. Its tools look for them.
DATABASES = ["data/omnisql"]


def recipes() -> list[str]:
    """Return the names of the recipes that run through the shared launcher."""
    return [path.parent.name for path in sorted(RECIPES.glob("*/run.sh"))]


def is_for_gpus(recipe: str) -> bool:
    """Return whether a recipe's full run is one on GPUs."""
    return "on_cpu=1" not in (RECIPES / recipe / "run.sh").read_text()


def cases(short: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each recipe with the variants to check: none, then one at a time.

    Args:
        short: Put the shared variants on top of the first recipe alone.
    """
    shared = sorted(path.stem for path in COMMON.glob("*.flags"))
    for number, recipe in enumerate(recipes()):
        own = sorted(path.stem for path in (RECIPES / recipe / "variants").glob("*.flags"))
        further = [name for name in shared if name not in own] if is_for_gpus(recipe) else []
        yield recipe, []
        for variant in [*own, *(further if number == 0 or not short else [])]:
            yield recipe, [variant]


def flags_of(recipe: str, variants: list[str], *more: str) -> list[str]:
    """Return the lines that `run.sh --print` prints: the recipe's configuration overrides.

    Raises:
        RuntimeError: The script fails; the message is its first line of errors.
    """
    chosen = [word for variant in variants for word in ("--variant", variant)]
    command = ["bash", str(RECIPES / recipe / "run.sh"), "--print", *chosen, *more]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[0] if ran.stderr.strip() else f"exit {ran.returncode}")
    return ran.stdout.splitlines()


def judge(config: Any) -> None:
    """Run verl's checks and ours on a configuration; what they raise is passed on."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    prepare_config(config)
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


def verdict(recipe: str, variants: list[str]) -> int:
    """Print the verdict on a recipe, and return the number of its training steps, 0 when a check failed."""
    from verl_multiturn.verl_bridge.compose import compose_config

    name = "+".join([recipe, *variants])
    try:
        config = compose_config([*flags_of(recipe, variants), *BOX])
        steps = count_steps(config, recipe, variants)
        if is_for_gpus(recipe):
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


def main() -> int:
    """Check all recipes, print the verdicts and the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the shared variants on top of one recipe alone")
    judged = list(cases(parser.parse_args().short))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for needed in DATABASES:
            Path(needed).mkdir(parents=True)
        steps = {"+".join([recipe, *variants]): verdict(recipe, variants) for recipe, variants in judged}
    failed = [name for name, count in steps.items() if not count]
    summary = {"recipes": len(recipes()), "variants": len(judged) - len(recipes()), "failed": failed, "steps": steps}
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
