"""The checks that verl itself makes of its configuration, made before Ray, a model or an engine starts.

verl's dataclasses check values where a worker makes one of them, minutes after the start. `validate_config` is called
when Ray has started.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup.view import RunView

_MODEL = "model"


def check_verls_classes(run: RunView) -> None:
    """Refuse what verl's dataclasses or its `validate_config` refuse.

    Raises:
        ConfigError: The message has the section and verl's own words.
    """
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    # Both change what they are given.
    config = copy.deepcopy(run.config)
    for key in _sections(run):
        _refuse(key, omega_conf_to_dataclass, _without_model(OmegaConf.select(config, key)))
    if run.is_fully_async:  # verl's program asserts a train_batch_size of 0, and does not call it
        return
    # A critic's class loads its model, so it is looked at above, without one.
    _refuse("verl's validate_config", validate_config, config, run.has_reference, False)


def _sections(run: RunView) -> Iterator[str]:
    """Yield the sections of which verl makes a dataclass."""
    yield from ("actor_rollout_ref.actor", "actor_rollout_ref.rollout")
    if run.has_critic:
        yield "critic"
    if run.value("distillation.enabled"):
        yield "distillation"


def _without_model(section: DictConfig) -> DictConfig:
    """Return a section whose model is no class: making that would load a tokenizer."""
    if OmegaConf.is_dict(section.get(_MODEL)):
        OmegaConf.set_struct(section, False)
        section[_MODEL].pop("_target_", None)
    return section


def _refuse(where: str, call: Callable[..., Any], *given: Any) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the same when it begins
            call(*given)
    except Exception as error:  # verl asserts, raises ValueError and others; Hydra wraps them
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):  # of a package that the machine of the workers may have
            return
        reason = str(cause).strip() or type(cause).__name__
        raise ConfigError(f"{where}: verl does not take these settings ({reason}); correct them") from None
