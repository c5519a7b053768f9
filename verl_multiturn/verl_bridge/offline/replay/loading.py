"""From a run's file to a `Replay`: settings, tokenizer and template, tools and interactions as the run had them.

Another tokenizer, template or list of schemas than the run's is refused, unless `--set` names the setting by which it
came about: that would be the difference, and not today's code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_multiturn.calls.limits import set_limits
from verl_multiturn.config import PATH
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.llm_user import LlmUserSettings
from verl_multiturn.interactions.running.registry import build_interaction, load_interactions
from verl_multiturn.records.read.origin import names_of, refuse_other
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.loading.registry import build_tools, schema_of
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.http_client import HttpSettings
from verl_multiturn.tools.sql import SqlSettings
from verl_multiturn.trust.settings import as_texts
from verl_multiturn.verl_bridge.loops.tools import load_run_tools
from verl_multiturn.verl_bridge.model.loading import load_model
from verl_multiturn.verl_bridge.offline.replay.conversations import Replay
from verl_multiturn.verl_bridge.settings import settings_of

logger = logging.getLogger(__name__)

Changes = Sequence[tuple[str, str]]
_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_SHORT = ("", "actor_rollout_ref.", f"{_ROLLOUT}.", f"{PATH.rpartition('.')[0]}.", f"{PATH}.")
"""The part that may be omitted at the beginning of a setting."""
_TOKENIZER = (f"{_MODEL}.path", f"{_MODEL}.tokenizer_path")
_TEMPLATE = (*_TOKENIZER, f"{_MODEL}.custom_chat_template", "data.apply_chat_template_kwargs")
_TOOLS = (
    f"{_ROLLOUT}.multi_turn.tool_config_path",
    f"{_ROLLOUT}.multi_turn.function_tool_path",
    f"{PATH}.derived.tool_config_path",
)
_INTERACTIONS = (f"{PATH}.interaction_config_path",)
_REMEDIES = {
    "tokenizer": f"say --set {_MODEL}.path=FOLDER to replay with another one",
    "template": f"say --set {_MODEL}.path=FOLDER or --set {_MODEL}.custom_chat_template=TEXT to replay with another",
    "tools": f"say --set {_TOOLS[0]}=FILE to replay with the tools of a file",
}


def load_replay(run: Mapping[str, Any], changes: Changes = (), is_live: bool = False) -> Replay:
    """Return the replay of a run's conversations.

    Args:
        run: The run's file (`schema.RunFile`).
        changes: Settings that are changed, with their values as YAML.
        is_live: Whether tools and interactions run again.

    Raises:
        ConfigError: The tokenizer, the template or the tools' schemas are others than the run's; there is no such
            setting; or something that the run needs is not here.
    """
    config, changed = changed_settings(run["settings"], changes)
    section = config.actor_rollout_ref.model
    model = load_model(section, f"say where they are with --set {_MODEL}.path=FOLDER", config.data)
    if is_live or changed & {*_TOOLS}:
        rollout = config.actor_rollout_ref.rollout
        multi_turn = rollout.multi_turn
        # A run has moved its file from the first to the last of `_TOOLS`.
        path = None if _TOOLS[0] in changed else settings_of(rollout).derived.tool_config_path
        path = path or multi_turn.get("tool_config_path")
        tools = load_run_tools(path, multi_turn.get("function_tool_path"))
    else:
        tools = recorded_tools(run["tools"], run["schemas"])
    refuse_other(
        run,
        _REMEDIES,
        vocabulary=None if changed & {*_TOKENIZER} else model.tokenizer.get_vocab(),
        template=None if changed & {*_TEMPLATE} else model.template,
        schemas=None if changed & {*_TOOLS} else [schema_of(tool).as_dict() for tool in tools.values()],
        model=repr(str(section.get("tokenizer_path") or section.path)),
    )
    if is_live or changed & {*_INTERACTIONS}:
        path = settings_of(config.actor_rollout_ref.rollout).interaction_config_path
        interactions = load_interactions(path) if path else {}
    else:
        interactions = recorded_interactions(run["interactions"])
    return Replay(config, model, tools, interactions, is_live, bool(changed))


def changed_settings(settings: Mapping[str, Any], changes: Changes) -> tuple[DictConfig, set[str]]:
    """Return a run's configuration with changes, and the whole names of the changed settings.

    Raises:
        ConfigError: There is no such setting, or a value is not YAML.
    """
    config = OmegaConf.create(as_texts(settings))  # they are resolved; a value like a reference is a text
    changed = set()
    for key, text in changes:
        name = _whole_name(config, key)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}={text}: the value is no YAML ({error}); quote it for the shell") from None
        OmegaConf.update(config, name, value, merge=False, force_add=True)
        changed.add(name)
    if any(name.startswith(PATH) for name in changed):
        settings_of(config.actor_rollout_ref.rollout)
    return config, changed


def _whole_name(config: DictConfig, key: str) -> str:
    for before in _SHORT:
        name = before + key
        parent, _, last = name.rpartition(".")
        if name.startswith(f"{PATH}.") and before != f"{PATH}." and last:
            return name  # `settings_of` knows the keys of ours
        section = OmegaConf.select(config, parent) if parent else config
        if isinstance(section, DictConfig) and last in section:
            return name
    if "." not in key:
        return f"{PATH}.{key}"
    raise ConfigError(f"--set {key}: the run has no such setting; name one as verl's configuration has it")


def recorded_tools(yaml_file: Any, schemas: Sequence[Any]) -> dict[str, Any]:
    """Return the tools of a recorded run, none of which is called.

    Those of classes and functions are built as a run builds them, from today's code. Tools that cannot be built
    here, such as those of an MCP server or an A2A agent, are known by their recorded schemas and limits.

    Args:
        yaml_file: Content of the tools' YAML; None: there was none.
        schemas: Schemas of all tools of the run, in their order.

    Raises:
        ConfigError: One is not a schema of a tool.
    """
    built: dict[str, Any] = {}
    unbuilt: list[Any] = []
    for index, entry in enumerate((yaml_file or {}).get("tools", [])):
        entry, where = _of_today(entry), f"the record's tools[{index}]"
        if "mcp" in entry or "a2a" in entry:
            unbuilt.append(entry.get("limits"))
            continue
        try:
            built |= {tool.name: tool for tool in build_tools(entry, where)}
        except Exception as error:  # an author's code, which may need things that are missing here
            logger.warning("%s is known by its schema alone: %s", where, describe(error))
            unbuilt.append(entry.get("limits"))
    found: dict[str, Any] = {}
    for name, raw in zip(names_of(schemas), schemas, strict=True):
        found[name] = built.pop(name) if name in built else _StandIn(raw, unbuilt)
    return {**found, **built}


def _of_today(entry: Any) -> Any:
    """Return an entry of a recorded YAML without settings that are constants now: they cannot be removed there.

    A class of the user's own may have settings of the same names, so that only a `config` of ours is changed.
    """
    if not isinstance(entry, dict):  # its builder raises the error
        return entry
    gone = {"limits": ToolLimits.GONE}
    if str(entry.get("class_name", "")).startswith("verl_multiturn."):
        gone["config"] = {**HttpSettings.GONE, **SqlSettings.GONE, **LlmUserSettings.GONE}
    changed = {key: names for key, names in gone.items() if isinstance(entry.get(key), Mapping)}
    return entry | {
        key: {name: value for name, value in entry[key].items() if name not in names} for key, names in changed.items()
    }


class _StandIn(BaseTool):
    """A tool that is known by its schema. Nothing of it is inherited, so that each of its methods is the record's."""

    def __init__(self, schema: Mapping[str, Any], limits: Sequence[Any]) -> None:
        super().__init__({}, ToolSchema.read(schema, "the record"))
        if limits and limits[0] is not None:
            if any(each != limits[0] for each in limits):
                logger.warning("tool %r has the limits of one of several servers; which, is not recorded", self.name)
            set_limits(self, limits[0], ToolLimits, "the record's limits")

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Not called; see `RecordedToolSession`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Not called; see `RecordedToolSession`."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Not called; see `RecordedToolSession`."""
        raise NotImplementedError

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Not called; see `RecordedToolSession`."""


def recorded_interactions(yaml_file: Any) -> dict[str, Interaction]:
    """Return the interactions of a recorded run by name; one that cannot be built here is omitted, and reported.

    Args:
        yaml_file: Content of the interactions' YAML; None: there was none.
    """
    found: dict[str, Interaction] = {}
    for index, entry in enumerate((yaml_file or {}).get("interaction", [])):
        entry, where = _of_today(entry), f"the record's interaction[{index}]"
        try:
            made = build_interaction(entry, where)
        except Exception as error:  # an author's code, which may need things that are missing here
            logger.warning("%s cannot be built here, its conversations are skipped: %s", where, describe(error))
            continue
        found[made.name] = made
    return found
