"""Answers of a run's configuration to the start-up check: each question has one method.

Answers are cached: a view shows the configuration as it was at the first call. Make a new view after a change of the
configuration.

Invariants:
- an early view answers without importing verl, torch or Ray, or any code of the user's. A question that needs one
  of them raises `LaterError`, and is repeated at the start.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.advantages.estimators import counts_conversations, is_own_function
from verl_multiturn.chat.tir import TIR
from verl_multiturn.config import PATH, MultiTurnSettings, read_settings
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import load_interactions
from verl_multiturn.paths import at_home
from verl_multiturn.runs.run_folder import OwnFiles
from verl_multiturn.verl_bridge.names import (
    ENGINE_CHOICE,
    OUR_LOOPS,
    OUR_TRAINER,
    PROXY_LOOP,
    ROLLOUT,
    VENDOR_VARIABLE,
)
from verl_multiturn.verl_bridge.settings import agent_loops, estimator_of, own_manager, runs_our_server, settings_of
from verl_multiturn.verl_bridge.startup import verl_classes, verl_keys

if TYPE_CHECKING:
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

TRAINERS = ("sync", "colocate_async", "separate_async")
"""verl's trainers that ours extend."""

_OURS = f"{PATH}."


_dry = False


def begin_dry_start() -> None:
    """Let this process be a dry start: no cluster is joined, and files that the run itself makes may be missing."""
    global _dry  # Hydra calls the start-up check, which takes no argument of ours
    _dry = True


def is_dry_start() -> bool:
    """Return whether this process is a dry start (`dry_start.py`)."""
    return _dry


class LaterError(Exception):
    """A question needs verl, the model's tokenizer or the user's code, and is answered in the trainer's own process."""


@dataclass(frozen=True)
class RunView:
    """A run's configuration, and the questions that the checks ask of it."""

    config: DictConfig
    """verl's whole configuration."""
    is_early: bool = False
    """Whether verl is not imported yet: the launcher raises refusals alone, and prints no warnings."""

    own_files: OwnFiles = "there"
    """Whether the run has made the files of its own folder, such as its rows."""

    def require_stack(self) -> None:
        """Leave a question that needs verl or the user's code to the start.

        Raises:
            LaterError: The view is an early one.
        """
        if self.is_early:
            raise LaterError

    def tell(self, message: str) -> None:
        """Print a warning; an early view prints nothing, since the start prints it."""
        if not self.is_early:
            print(f"verl-multiturn: {message}", file=sys.stderr)

    def will_be_made(self, path: str | Path) -> bool:
        """Return whether the run itself may make a file or folder before it starts the trainer: in its own folder."""
        out, path = self.value("recipe.out"), Path(path).expanduser()
        when = "maybe" if is_dry_start() else self.own_files
        if out is None or Path(out) not in path.absolute().parents:
            return False
        return when == "later" or (when == "maybe" and not path.exists())

    def value(self, key: str) -> Any:
        """Return the value of a setting; of ours its default where it is not set, of verl's None."""
        return _ours(self.settings, key) if key.startswith(_OURS) else OmegaConf.select(self.config, key)

    def is_set(self, key: str) -> bool:
        """Return whether a setting has another value than its default, which is None for one of verl's."""
        default = _ours(read_settings(None), key) if key.startswith(_OURS) else None
        return bool(self.value(key) != default)

    def is_changed(self, key: str) -> bool:
        """Return whether a setting of verl has another value than verl's own default.

        The defaults are those of the flat file that verl ships for the run's `model_engine`; an interpolation there
        counts as its value in this run. A setting that only verl's rollout dataclass knows has its default there.
        """
        defaults, (section, _, name) = verl_keys.defaults(str(self.config.get("model_engine"))), key.rpartition(".")
        if key in defaults and self._written.get(key, ...) == defaults[key]:
            return False
        if name not in (self.value(section) or ()):
            return False  # a program of its own may leave settings out
        value = self.value(key)
        if key not in defaults:
            return value is not None and value != verl_classes.default_of(verl_classes.ROLLOUT, name)
        default = defaults[key]
        if isinstance(default, str) and "${" in default:
            restored = copy.deepcopy(self.config)
            OmegaConf.update(restored, key, default)
            default = OmegaConf.select(restored, key)
        return bool(value not in (default, at_home(default)))  # a run's `~/` may be expanded by now

    def written(self, key: str) -> Any:
        """Return a setting as it is written, a reference unresolved; None where it is not there."""
        return self._written.get(key)

    @cached_property
    def _written(self) -> dict[str, Any]:
        """The settings as they are written, with interpolations unresolved."""
        return dict(verl_keys.leaves(OmegaConf.to_container(self.config)))

    def changed(self, pattern: str) -> list[str]:
        """Return the settings of verl that fit a pattern, with `*` for any text, and are not defaults."""
        keys = verl_keys.defaults(str(self.config.get("model_engine")))
        return [key for key in keys if fnmatchcase(key, pattern) and "_target_" not in key and self.is_changed(key)]

    @cached_property
    def settings(self) -> MultiTurnSettings:
        """Our settings; raises ConfigError for an unknown key or a value that does not fit."""
        return settings_of(self.rollout)

    @property
    def rollout(self) -> Any:
        """The section `actor_rollout_ref.rollout`."""
        return self.config.actor_rollout_ref.rollout

    @property
    def multi_turn(self) -> Any:
        """The section `actor_rollout_ref.rollout.multi_turn`."""
        return self.rollout.multi_turn

    @property
    def longest_row(self) -> int:
        """The most tokens that a row may have."""
        return int(self.rollout.prompt_length + self.rollout.response_length)

    @property
    def is_sglang(self) -> bool:
        """Whether the engine is SGLang, with servers of verl's or of ours."""
        return self.rollout.name in (ROLLOUT, "sglang")

    @property
    def runs_our_server(self) -> bool:
        """Whether the servers are ours."""
        return runs_our_server(self.rollout)

    # The agent loops of the rows.

    @cached_property
    def _agent_loops(self) -> tuple[set[str], bool]:
        return agent_loops(self.config)

    @property
    def loops(self) -> set[str]:
        """The agent loops that rows of the run use."""
        return self._agent_loops[0]

    @property
    def knows_loops(self) -> bool:
        """Whether no row can use another loop than `loops`."""
        return self._agent_loops[1]

    @property
    def has_our_loop(self) -> bool:
        """Whether a row uses an agent loop of ours."""
        return bool(self.loops & OUR_LOOPS)

    @property
    def has_agents(self) -> bool:
        """Whether a row is a session of an agent behind the endpoint."""
        return PROXY_LOOP in self.loops

    @property
    def own_manager(self) -> str | None:
        """The agent-loop manager of the user's own; None without one."""
        return own_manager(self.rollout.agent)

    # Model and tools.

    @property
    def is_text_mode(self) -> bool:
        """Whether a conversation is one text with code blocks, without messages and calls."""
        return bool(self.multi_turn.format == TIR)

    @property
    def tool_files(self) -> tuple[str | None, str | None]:
        """The tool YAML, and the Python file of functions; None without them."""
        path = self.multi_turn.tool_config_path or self.settings.derived.tool_config_path
        return path, self.multi_turn.get("function_tool_path")

    @cached_property
    def tools(self) -> dict[str, Any]:
        """The tools of the run by name; raises ConfigError where one cannot be loaded."""
        self.require_stack()
        from verl_multiturn.verl_bridge.loops.tools import load_run_tools

        return load_run_tools(*self.tool_files)

    @cached_property
    def interactions(self) -> dict[str, Interaction]:
        """The interactions of the run by name; raises ConfigError where one cannot be loaded."""
        self.require_stack()
        path = self.settings.interaction_config_path
        return {} if path is None else load_interactions(path)

    @cached_property
    def engine_images(self) -> dict[str, Any]:
        """How the engine must resize images, as `mm_process_config`; empty for a text model or one that is elsewhere.

        Raises ConfigError for a model for images whose processor is missing.
        """
        if (path := local_model(self.config)) is None:
            return {}
        self.require_stack()
        from verl_multiturn.verl_bridge.model.processors import engine_image_settings, load_processor, plain_dict

        model_type = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        trust = bool(self.config.actor_rollout_ref.model.get("trust_remote_code"))
        processor = load_processor(str(path), model_type, trust)
        kwargs = plain_dict(self.config.data.get("mm_processor_kwargs"))
        return {} if processor is None else engine_image_settings(kwargs)

    @cached_property
    def model(self) -> LoadedModel:
        """The tokenizer, template and processor of the run's model.

        Raises ConfigError where they are not on this machine, or cannot be loaded.
        """
        self.require_stack()
        from verl_multiturn.verl_bridge.model.loading import load_model

        return load_model(self.config.actor_rollout_ref.model, "name a folder with both")

    @cached_property
    def model_tokens(self) -> int | None:
        """The most tokens of a row that the model's configuration names; None where verl finds none on this machine."""
        self.require_stack()
        from verl_multiturn.verl_bridge.model.loading import most_tokens

        return most_tokens(self.config.actor_rollout_ref.model)

    @cached_property
    def teachers(self) -> dict[str, str]:
        """The models of verl's teachers, by the names of their entries; empty without distillation."""
        if not self.value("distillation.enabled"):
            return {}
        entries = self.value("distillation.teacher_models") or {}
        if len(entries) > 1:  # verl then drops the entry of its default
            entries = {name: each for name, each in entries.items() if name != "teacher_model"}
        found = {name: each.get("model_path") for name, each in entries.items() if OmegaConf.is_dict(each)}
        return {name: str(path) for name, path in found.items() if path}

    @cached_property
    def teacher_tokens(self) -> dict[str, tuple[list[str], list[str]]]:
        """The tokens that a teacher has otherwise, and those that it lacks, by the names of `teachers`."""
        if not self.teachers:
            return {}
        self.require_stack()
        from verl_multiturn.verl_bridge.model.loading import differing_tokens

        model = self.config.actor_rollout_ref.model
        return {name: differing_tokens(model, path) for name, path in self.teachers.items()}

    # Trainer and algorithm.

    @property
    def is_v1(self) -> bool:
        """Whether verl's V1 trainer runs."""
        return bool(self.config.trainer.use_v1) and not self.is_fully_async

    @property
    def is_fully_async(self) -> bool:
        """Whether verl's fully asynchronous program runs, which has a trainer of its own, and a section of its own."""
        return "async_training" in self.config

    @property
    def is_fsdp(self) -> bool:
        """Whether the actor's trainer engine is one of FSDP."""
        return str(self.value("actor_rollout_ref.actor.strategy")).startswith("fsdp")

    @property
    def is_megatron(self) -> bool:
        """Whether the actor's trainer engine is Megatron."""
        return bool(self.value("actor_rollout_ref.actor.strategy") == "megatron")

    @property
    def trainer_mode(self) -> Any:
        """The name of the configured trainer."""
        return self.value("trainer.v1.trainer_mode")

    @property
    def is_asynchronous(self) -> bool:
        """Whether the trainer's name is that of an asynchronous one, be it verl's, ours or another."""
        return str(self.trainer_mode).endswith("_async")

    @property
    def our_trainer(self) -> str | None:
        """Which of verl's trainers runs, where we have one that extends it; None otherwise."""
        mode = str(self.trainer_mode).removeprefix(OUR_TRAINER)
        return mode if self.is_v1 and mode in TRAINERS else None

    @property
    def engine_vendor(self) -> str | None:
        """The vendor of a training engine that the user has chosen; None: verl looks which devices there are."""
        return self.value(ENGINE_CHOICE) or os.environ.get(VENDOR_VARIABLE)

    @property
    def cluster(self) -> str | None:
        """The configured address of a Ray cluster; None: Ray is started on this machine."""
        address = self.value("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
        return None if address in (None, "", "local") else str(address)

    @property
    def estimator(self) -> str:
        """The name of the estimator of advantages."""
        return estimator_of(self.config)

    @property
    def policy_loss(self) -> str:
        """The name of the policy loss."""
        return str(self.value("actor_rollout_ref.actor.policy_loss.loss_mode") or "vanilla")

    @property
    def counts_conversations(self) -> bool:
        """Whether the estimator counts conversations; verl's own count rows."""
        return counts_conversations(self.estimator)

    @property
    def has_own_estimator(self) -> bool:
        """Whether the estimator is a function of the run's own."""
        return is_own_function(self.estimator)

    @property
    def filter_metric(self) -> str | None:
        """The number by which verl leaves out groups whose samples are all alike; None: it leaves out none."""
        filtered = self.value("algorithm.filter_groups") or {}
        return str(filtered.get("metric")) if filtered.get("enable") else None

    @property
    def asks_for_critic(self) -> bool:
        """Whether `critic.enable` is True; without it, verl decides by the estimator."""
        return bool(self.value("critic.enable"))

    @property
    def has_critic(self) -> bool:
        """Whether verl trains a critic, as its `need_critic` decides."""
        enabled = self.value("critic.enable")
        return self.estimator == "gae" if enabled is None else bool(enabled)

    @property
    def has_reference(self) -> bool:
        """Whether verl compares the actor with a reference, as its `need_reference_policy` decides."""
        return bool(self.value("algorithm.use_kl_in_reward") or self.value("actor_rollout_ref.actor.use_kl_loss"))

    @property
    def colocated_reward_model(self) -> str | None:
        """The section of a reward model on the trainer's own devices, whose scores replace all others; None without."""
        # `reward_model` is verl's older section; the trainer moves it into `reward.reward_model`.
        for section in ("reward.reward_model", "reward_model"):
            model = self.value(section) or {}
            if model.get("enable") and not model.get("enable_resource_pool"):
                return section
        return None


def local_model(config: DictConfig, tokenizer: bool = False) -> Path | None:
    """Return the folder of the model, or of the tokenizer in its place; None if it is not on this machine."""
    model = config.actor_rollout_ref.model
    path = Path((tokenizer and model.get("tokenizer_path")) or model.path).expanduser()
    return path if (path / "config.json").is_file() else None


def _ours(settings: MultiTurnSettings, key: str) -> Any:
    return attrgetter(key.removeprefix(_OURS))(settings)
