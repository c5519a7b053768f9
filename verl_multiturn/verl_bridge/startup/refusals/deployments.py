"""Refusals of deployments of a run's checkpoints at a gateway, which would fail only after the first evaluation."""

from __future__ import annotations

from verl_multiturn.clients.chat_endpoint import check_address, key_of
from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.startup.table import Check
from verl_multiturn.verl_bridge.startup.view import RunView

_EVALUATION = f"{PATH}.checkpoint_evaluation"


def check_deployments(run: RunView) -> None:
    """Refuse an address of a gateway that is none, and a key that is not there."""
    settings = run.settings.checkpoint_evaluation
    if settings.deploy_to is not None:
        check_address(settings.deploy_to, f"{_EVALUATION}.deploy_to")
        key_of(settings.deploy_key_env, f"{_EVALUATION}.deploy_key_env")


DEPLOYMENTS: list[Check] = [check_deployments]
