"""A start of verl's trainer that ends where the trainer would begin: `verl-multiturn run NAME --check`.

    python -m verl_multiturn.verl_bridge.startup.dry_start TRAINER'S ARGUMENTS

Hydra composes the configuration and calls the start-up check, as in the trainer's own process. A configuration that is
accepted is described in the last line of standard output, as JSON.

Invariants:
- it runs the start's checks, by the same callback, each check once;
- Ray is neither started nor joined: of a cluster, the logical CPUs are counted only at the start.
"""

from __future__ import annotations

import json
import sys

import hydra
import verl  # noqa: F401  # which loads the plugin, and with it the start-up check
from omegaconf import DictConfig

from verl_multiturn.verl_bridge.startup.plan_table import facts_of
from verl_multiturn.verl_bridge.startup.view import RunView, begin_dry_start


def describe(config: DictConfig) -> None:
    """Print the facts of a run; Hydra has called the start-up check by then.

    Args:
        config: verl's whole configuration, checked and completed.
    """
    print(json.dumps(facts_of(RunView(config)), default=str), file=sys.stdout, flush=True)


if __name__ == "__main__":
    begin_dry_start()
    hydra.main(config_path=None, config_name="ppo_trainer", version_base=None)(describe)()
