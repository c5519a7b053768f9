"""The start-up check: a wrong setting ends the run before Ray, a model or an engine starts.

It is a Hydra callback, selected through Hydra's config store; verl itself is not changed. So it runs inside
`python -m verl.trainer.main_ppo`, and inside every other Hydra program with verl's configuration. A program that
builds the configuration in another way has to call `prepare_config` itself.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.import_utils import resolve_config_path

from verl_multiturn.chat.shown_schemas import must_stay
from verl_multiturn.chat.template_rules import Verdict, refusals
from verl_multiturn.chat.tir import TIR, takes_code
from verl_multiturn.config import PATH, MultiTurnSettings, check_place
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.verl_bridge.loops.tools import load_run_tools
from verl_multiturn.verl_bridge.model.call_formats import check_format
from verl_multiturn.verl_bridge.model.chat_setup import check_names, check_python_names, examine_model, load_chat
from verl_multiturn.verl_bridge.model.processors import engine_image_settings, load_processor, plain_dict
from verl_multiturn.verl_bridge.names import AGENT_LOOP, MANAGER, OUR_LOOPS, OUR_TRAINER, PROXY_LOOP, ROLLOUT
from verl_multiturn.verl_bridge.settings import agent_loops, own_loops, settings_of
from verl_multiturn.verl_bridge.startup.adapters import check_adapters
from verl_multiturn.verl_bridge.startup.batch_sizes import check_batch_sizes
from verl_multiturn.verl_bridge.startup.context import check_context
from verl_multiturn.verl_bridge.startup.estimators import check_estimators
from verl_multiturn.verl_bridge.startup.interactions import check_interactions, check_user_turns, move_old_key
from verl_multiturn.verl_bridge.startup.our_trainer import check_mode, our_mode, require_our_trainer
from verl_multiturn.verl_bridge.startup.oversampling import check_over_sampling
from verl_multiturn.verl_bridge.startup.own_code import check_own_code, has_other_environment
from verl_multiturn.verl_bridge.startup.paths import check_paths
from verl_multiturn.verl_bridge.startup.proxy import check_proxy
from verl_multiturn.verl_bridge.startup.ray_cpus import check_ray_cpus, required_ray_cpus
from verl_multiturn.verl_bridge.startup.scores import check_scores
from verl_multiturn.verl_bridge.startup.staleness import check_staleness

# Agent loops of verl that never call a tool, and do not say so.
_TOOL_LESS_LOOPS = {"single_turn_agent"}

# Values of verl's `rollout.multi_turn.tokenization_sanity_check_mode`.
SANITY_MODES = {"disable", "strict", "ignore_strippable"}

ConfigHook = Callable[[DictConfig, int], None]
config_hooks: list[ConfigHook] = []
"""Functions that fill in a platform's settings.

Each is called with the configuration and the number of logical CPUs that Ray must have.
"""


def prepare_config(config: DictConfig) -> None:
    """Check a whole trainer configuration, and complete it in place.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: the run cannot work; the message names the setting, its value and the remedy.
    """
    rollout = config.actor_rollout_ref.rollout
    check_place(config)
    move_old_key(config)
    settings = settings_of(rollout)
    check_mode(config)
    check_adapters(config)
    parts = required_ray_cpus(config)
    for hook in config_hooks:
        hook(config, sum(parts.values()))
    loops, known = agent_loops(config)
    if rollout.multi_turn.enable and known and loops <= _TOOL_LESS_LOOPS:
        raise ConfigError(
            f"rollout.multi_turn.enable=True, but the agent loop {min(loops)!r} never calls a tool; set "
            f"actor_rollout_ref.rollout.agent.default_agent_loop={AGENT_LOOP}, or multi_turn.enable=False"
        )
    if rollout.name == ROLLOUT and known and not loops & OUR_LOOPS and not own_loops(rollout.agent):
        print(
            f"verl-multiturn: rollout.name=sglang_async, but no row uses the agent loop {AGENT_LOOP}: this run's loop "
            f"is verl's {' and '.join(sorted(map(str, loops)))}, without our tools' life, limits, records and "
            f"certificate; for ours set actor_rollout_ref.rollout.agent.default_agent_loop={AGENT_LOOP}",
            file=sys.stderr,
        )
    check_proxy(config, settings, loops)
    if loops & OUR_LOOPS:
        _check_our_loop(config, settings, loops)
        check_scores(config, settings)
        check_context(config, settings)
        _check_void_turns(config, settings)
        check_staleness(config, settings)
        check_estimators(config, settings)
        if our_mode(config) is not None:
            check_batch_sizes(config)
        check_over_sampling(config)
        _choose_trainer(config, settings)
    else:
        _check_nothing_is_ignored(rollout, settings)
    if loops & OUR_LOOPS or rollout.name == ROLLOUT:
        check_ray_cpus(config, parts)


def _check_our_loop(config: DictConfig, settings: MultiTurnSettings, loops: set[str]) -> None:
    rollout = config.actor_rollout_ref.rollout
    multi_turn = rollout.multi_turn
    check_format(multi_turn.format)
    _check_dead_keys(rollout)
    _check_images(config)
    _check_template(config, settings)
    check_interactions(config, settings)
    path = multi_turn.tool_config_path or settings.tool_config_path
    function_path = multi_turn.get("function_tool_path")
    idle = multi_turn.enable and not path and not function_path and settings.interaction_config_path is None
    if idle and PROXY_LOOP not in loops:
        raise ConfigError(
            "rollout.multi_turn.enable=True, but neither rollout.multi_turn.tool_config_path nor function_tool_path "
            f"names tools, and {PATH}.interaction_config_path no interactions; set one of them, or "
            "multi_turn.enable=False"
        )
    if settings.turns_reminder and multi_turn.max_assistant_turns is None:
        raise ConfigError(
            f"{PATH}.turns_reminder=True, but multi_turn.max_assistant_turns is null, so no turns can be counted down; "
            "set it, or leave the reminder out"
        )
    with open_dict(config):
        if multi_turn.format == TIR:
            rollout.skip_tokenizer_init = False  # SGLang needs a tokenizer to stop at a text
        if path or function_path:
            tools = load_run_tools(path, function_path)
            _check_code_tool(multi_turn.format, tools)
            check_python_names(multi_turn.format, tools.values())
            _check_tool_names(config, tools)
        if function_path:  # workers may have another working directory
            multi_turn.function_tool_path = str(Path(resolve_config_path(function_path)).resolve())
        if path:
            OmegaConf.update(config, f"{PATH}.tool_config_path", str(Path(path).resolve()), force_add=True)
            if loops <= OUR_LOOPS:  # other loops take their tools from verl's setting
                multi_turn.tool_config_path = None
        if settings.record_dir:
            # Workers may have another working directory than the driver.
            OmegaConf.update(config, f"{PATH}.record_dir", str(Path(settings.record_dir).resolve()))


def _check_dead_keys(rollout: DictConfig) -> None:
    """Refuse keys that verl's configuration still has and nothing reads any more."""
    dead = {
        "multi_turn.use_inference_chat_template": "leave it out: the chat template of the model is always used",
        "multi_turn.num_repeat_rollouts": "leave it out, and set rollout.n",
    }
    for key, remedy in dead.items():
        if value := OmegaConf.select(rollout, key):
            raise ConfigError(f"actor_rollout_ref.rollout.{key}={value}: nothing in verl 0.9.1 reads it; {remedy}")


def _check_code_tool(tool_format: str, tools: Mapping[str, Any]) -> None:
    """Refuse text mode when no tool takes code. There may be several, since each row may select one of them."""
    if tool_format == TIR and not any(takes_code(schema_of(tool).as_dict()) for tool in tools.values()):
        raise ConfigError(
            f"rollout.multi_turn.format={TIR}: none of the tools {sorted(tools)} requires a string `code` and "
            "nothing else; add one that runs code, as in tool_configs/python.yaml"
        )


def _check_tool_names(config: DictConfig, tools: Mapping[str, Any]) -> None:
    """Refuse tools with names that no model could write; skipped when the model does not lie on this machine."""
    model, multi_turn = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.multi_turn
    path = Path(model.get("tokenizer_path") or model.path).expanduser()
    names = [name for tool in tools.values() for name in must_stay(schema_of(tool).as_dict())]
    # Names of letters, digits and the like hold no control token, so the tokenizer need not be loaded.
    plain = all(re.fullmatch(r"[\w .-]*", name) for name in names)
    if plain or multi_turn.format == TIR or not (path / "config.json").is_file():
        return
    _, chat = load_chat(
        str(path),
        plain_dict(config.data.get("apply_chat_template_kwargs")),
        custom_chat_template=model.get("custom_chat_template"),
        trust_remote_code=config.data.get("trust_remote_code"),
        mm_processor_kwargs=plain_dict(config.data.get("mm_processor_kwargs")),
    )
    check_names(chat.codec, tools.values())


def _check_void_turns(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Refuse `void_turn_pattern` with a trainer that would silently train on rows with void turns."""
    if settings.void_turn_pattern is not None:
        require_our_trainer(config, f"{PATH}.void_turn_pattern={settings.void_turn_pattern!r}", "leave the pattern out")


def _check_nothing_is_ignored(rollout: DictConfig, settings: MultiTurnSettings) -> None:
    """Refuse settings in a run without our agent loop, where nothing would follow them."""
    ours = {name: getattr(settings, name) for name in ("max_staleness", "interaction_config_path")}
    given = {f"{PATH}.{name}": value for name, value in ours.items() if value is not None}
    if rollout.name == ROLLOUT and rollout.get("over_sample_rate"):
        given["actor_rollout_ref.rollout.over_sample_rate"] = rollout.over_sample_rate
    for key, value in given.items():
        raise ConfigError(
            f"{key}={value!r} has no effect, since no row is known to use the agent loop {AGENT_LOOP}; set "
            f"actor_rollout_ref.rollout.agent.default_agent_loop={AGENT_LOOP}, or leave it out"
        )


def _choose_trainer(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Replace verl's trainer by ours of the same mode, which verifies its batches and reports on the rollout.

    Without such a trainer, print that batches are not verified, unless `certificate_share` is 0.
    """
    if (mode := our_mode(config)) is not None:
        _check_cached_rollouts(config, settings)
        config.trainer.v1.trainer_mode = OUR_TRAINER + mode
        agent = config.actor_rollout_ref.rollout.agent
        if not agent.get("agent_loop_manager_class"):
            with open_dict(config):
                agent.agent_loop_manager_class = MANAGER
        return
    if settings.certificate_share == 0:
        return
    name = OmegaConf.select(config, "trainer.v1.trainer_mode")
    setting = f"trainer.v1.trainer_mode={name}" if config.trainer.use_v1 else "trainer.use_v1=False"
    print(
        f"verl-multiturn: {setting}: training batches are not verified against what the engine returned, and there are "
        f"no rollout/* metrics (only with verl's own V1 trainers); {PATH}.certificate_share=0 silences this",
        file=sys.stderr,
    )


def _check_cached_rollouts(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Refuse verl's cached rollouts when rows are verified: they come back under other names and versions."""
    if settings.certificate_share > 0 and OmegaConf.select(config, "skip.rollout_tq.enable"):
        raise ConfigError(
            "skip.rollout_tq.enable=True: verl gives cached rollouts another name and other weight versions than those "
            f"that they were sampled under, so that they cannot be verified; set {PATH}.certificate_share=0, or "
            "skip.rollout_tq.enable=False"
        )


def _check_images(config: DictConfig) -> None:
    """Refuse a model for images without a processor, and give the engine verl's settings for resizing images.

    Skipped when the model does not lie on this machine.
    """
    path = Path(config.actor_rollout_ref.model.path).expanduser()
    if not (path / "config.json").is_file():
        return
    model_type = json.loads((path / "config.json").read_text()).get("model_type")
    processor = load_processor(str(path), model_type, bool(config.data.get("trust_remote_code")))
    wanted = engine_image_settings(plain_dict(config.data.get("mm_processor_kwargs")))
    if processor is None or not wanted:
        return
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang.mm_process_config"
    given = plain_dict(OmegaConf.select(config, key))
    if given and given != wanted:
        raise ConfigError(
            f"{key}={given}, but data.mm_processor_kwargs asks for {wanted}: engine and trainer would see other "
            "images; leave the first out"
        )
    with open_dict(config):
        OmegaConf.update(config, key, wanted, force_add=True)


def _check_template(config: DictConfig, settings: MultiTurnSettings) -> None:
    """Refuse a chat template that would train on tokens the model never saw.

    Skipped when the model does not lie on this machine.
    """
    model, multi_turn = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.multi_turn
    mode = multi_turn.get("tokenization_sanity_check_mode", "strict")
    if mode not in SANITY_MODES:
        raise ConfigError(
            f"rollout.multi_turn.tokenization_sanity_check_mode={mode!r}: expected one of {sorted(SANITY_MODES)}"
        )
    path = Path(model.get("tokenizer_path") or model.path).expanduser()
    if mode == "disable" or not (path / "config.json").is_file():
        return
    rules = examine_model(
        str(path),
        multi_turn.format,
        tools=bool(multi_turn.enable),
        template_kwargs=plain_dict(config.data.get("apply_chat_template_kwargs")),
        custom_chat_template=model.get("custom_chat_template"),
        trust_remote_code=config.data.get("trust_remote_code"),
        mm_processor_kwargs=plain_dict(config.data.get("mm_processor_kwargs")),
    )
    check_user_turns(str(path), rules, settings)
    known = [rule for rule in rules if rule.verdict is Verdict.KNOWN]
    if known:
        listed = "; ".join(f"{rule.name}: {rule.found}" for rule in known)
        print(f"verl-multiturn: chat template of {str(path)!r}: {listed}", file=sys.stderr)
    if refused := refusals(rules):
        raise ConfigError(
            f"the chat template of {str(path)!r} cannot be trained on: {refused}. Use another model, format or "
            f"template (`verl-multiturn doctor --model {path}` shows every rule), or, at your own risk, "
            "rollout.multi_turn.tokenization_sanity_check_mode=disable"
        )


class StartUpCheck(Callback):
    """Hydra callback that runs `prepare_config` before the trainer's main function.

    Before it, it looks for the files and folders that the configuration names, which lie on the machine of the run
    alone; after it, since an import may take long, it imports the user's own code.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration of verl's trainer; exit with status 2 when it cannot work."""
        if not _is_trainer_config(config):
            return
        try:
            check_paths(config)
            is_elsewhere = has_other_environment(config)
            prepare_config(config)
            check_own_code(config, is_imported=not is_elsewhere)
        except MultiTurnError as error:
            # Hydra turns a callback's Exception into a warning and goes on. SystemExit is no Exception.
            print(f"\nverl-multiturn: {error}\n", file=sys.stderr)
            raise SystemExit(2) from None
        except Exception:  # a bug in the check must not pass for a checked configuration
            traceback.print_exc()
            raise SystemExit(1) from None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse `--multirun` of verl's trainer with exit status 2."""
        # Hydra composes the configuration of each job after its callbacks have run, so they cannot check it.
        if _is_trainer_config(config):
            print(
                "\nverl-multiturn: Hydra's --multirun skips the start-up check; start the runs one by one\n",
                file=sys.stderr,
            )
            raise SystemExit(2)


def _is_trainer_config(config: DictConfig) -> bool:
    """Tell whether this is verl's trainer, and not another Hydra program in the same environment."""
    return all(OmegaConf.select(config, key) is not None for key in ("actor_rollout_ref.rollout.multi_turn", "trainer"))


def register_callback() -> None:
    """Make `StartUpCheck` the default of Hydra's `hydra/callbacks` group in this process."""
    store = ConfigStore.instance()
    name = "verl_multiturn"
    store.store(group="hydra/callbacks", name=name, node={name: {"_target_": f"{__name__}.{StartUpCheck.__name__}"}})
    hydra = store.load("hydra/config.yaml").node
    for entry in hydra.defaults:
        if "callbacks" in entry and entry.callbacks is None:
            entry.callbacks = name
    store.store(group="hydra", name="config", node=hydra, provider="hydra")
