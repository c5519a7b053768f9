"""Refusals about the agent loop of our conversations: its settings, the model's template, interactions and tools."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from verl_multiturn.calls.limits import CallLimits, limits_of
from verl_multiturn.chat.messages import check_last_speaker
from verl_multiturn.chat.parsing.formats import FORMATS
from verl_multiturn.chat.template_rules import NO_USER_TURN, Rule, RuleEffect, refusals
from verl_multiturn.chat.tir import TIR, takes_code
from verl_multiturn.chat.tool_schemas import must_stay
from verl_multiturn.config import DERIVED, OPTIONS_BEFORE, PATH, MultiTurnSettings, check_place, why_not_derived
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.running.registry import interaction_of_row
from verl_multiturn.tools.loading.kwargs import SHOWN
from verl_multiturn.tools.loading.registry import load_tools, schema_of
from verl_multiturn.verl_bridge.names import LOOPS_OF_VERL, OUR_LOOPS, ROLLOUT
from verl_multiturn.verl_bridge.settings import own_loops, settings_of
from verl_multiturn.verl_bridge.startup.setting_changes import IMAGES, OLD_KEY
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, set_beside
from verl_multiturn.verl_bridge.startup.view import RunView, local_model

_ROLLOUT = "actor_rollout_ref.rollout"
_MULTI_TURN = f"{_ROLLOUT}.multi_turn"
_INTERACTIONS = f"{PATH}.interaction_config_path"
_HISTORY = f"{PATH}.proxy.history"
_RESPONSE_LENGTH = f"{_MULTI_TURN}.max_tool_response_length"
_CHECK_MODE = f"{_MULTI_TURN}.tokenization_sanity_check_mode"
# Values of that setting.
_CHECK_MODES = ("disable", "ignore_strippable", "strict")
# Agent loops of verl that never call a tool, without a warning.
_TOOL_LESS_LOOPS = {"single_turn_agent"}


def check_places(run: RunView) -> None:
    """Refuse settings of ours that are misspelt, have a value that does not fit, or are where nothing reads them."""
    check_place(run.config)
    settings_of(run.rollout)


def tell_of_history(run: RunView) -> None:
    """Warn that `custom.multiturn.proxy.history` has no other value than `sampled`, and will be refused."""
    if OmegaConf.select(run.config, _HISTORY) is not None:
        run.tell(f"{_HISTORY}=sampled: sessions know no other history, and the next version refuses it; leave it out")


def tell_of_options(run: RunView) -> None:
    """Warn that `custom.multiturn.advantage.{gamma, weight, norm, across}` are options of an estimator now."""
    for name, (option, values) in OPTIONS_BEFORE.items():
        key = f"{PATH}.advantage.{name}"
        if (value := OmegaConf.select(run.config, key)) is not None:
            now = f"{PATH}.advantage.options.{option}={values.get(value, value)}"
            run.tell(f"{key}={value}: it is an option of the estimator now; write {now}")


def check_derived(run: RunView) -> None:
    """Refuse state of the start-up check among the words of the trainer's command."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    keys = DERIVED.split(".")
    for word in map(str, run.value("hydra.overrides.task") or []):
        override = OverridesParser.create().parse_override(word)  # Hydra has read it, too
        own, held = override.key_or_group.split("."), override.value()
        for key in keys[len(own) :]:  # a word may have a whole section
            held = held.get(key) if isinstance(held, Mapping) else None
        is_whole = own == keys[: len(own)] and held is not None
        if not override.is_delete() and (own[: len(keys)] == keys or is_whole):
            raise ConfigError(why_not_derived(word.lstrip("+")))


def check_loop_names(run: RunView) -> None:
    """Refuse an unknown agent loop, in the configuration or in the column `agent_name` of local rows."""
    if not run.knows_loops or own_loops(run.rollout.agent) or run.loops <= {*OUR_LOOPS, *LOOPS_OF_VERL}:
        return
    run.require_stack()  # a plugin of the user's may register others
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    known = sorted({*_agent_loop_registry, *OUR_LOOPS})
    if unknown := sorted(run.loops - set(known), key=str):
        hint = did_you_mean(str(unknown[0]), known) or f"known are {known}"
        raise ConfigError(
            f"unknown agent loop {unknown[0]!r} in rollout.agent.default_agent_loop or the column agent_name; {hint}"
        )


PLACES: list[Check] = [
    check_places,
    check_derived,
    tell_of_history,
    tell_of_options,
    check_loop_names,
    RefusalRow(
        OLD_KEY,
        when=lambda run: run.is_set(OLD_KEY) and run.value(_INTERACTIONS) not in (None, run.value(OLD_KEY)),
        why=f"{_INTERACTIONS}={{run.settings.interaction_config_path!r}} names another file",
        remedy="leave the first out",
    ),
]

LOOPS = [
    RefusalRow(
        f"{_MULTI_TURN}.enable",
        when=lambda run: run.multi_turn.enable and run.knows_loops and run.loops <= _TOOL_LESS_LOOPS,
        why="the agent loop 'single_turn_agent' never calls a tool",
        remedy=f"set {_ROLLOUT}.agent.default_agent_loop={{AGENT_LOOP}}, or multi_turn.enable=False",
    ),
    RefusalRow(
        f"{_ROLLOUT}.name",
        when=lambda run: (
            run.runs_our_server
            and run.knows_loops
            and not run.has_our_loop
            and not own_loops(run.rollout.agent)
            and " and ".join(sorted(map(str, run.loops)))
        ),
        given=f"{_ROLLOUT}.name={ROLLOUT!r}",
        why="no row uses the agent loop {AGENT_LOOP}. This run's loop is verl's {found}, without our tools' life, "
        "limits, records and certificate",
        remedy=f"for ours set {_ROLLOUT}.agent.default_agent_loop={{AGENT_LOOP}}",
        is_refusal=False,
    ),
]


def _dead(name: str, remedy: str) -> RefusalRow:
    """Return the row of a key that verl's configuration still has and nothing reads any more."""
    key = f"{_MULTI_TURN}.{name}"
    return RefusalRow(key, lambda run: run.value(key), "nothing in verl 0.9.1 reads it", remedy)


def check_call_format(run: RunView) -> None:
    """Refuse an unknown `multi_turn.format`."""
    if run.multi_turn.format in {*FORMATS, TIR}:
        return
    run.require_stack()  # the others are verl's, or registered with it
    from verl_multiturn.verl_bridge.model.call_formats import check_format

    check_format(run.multi_turn.format)


def check_template(run: RunView) -> None:
    """Refuse a chat template that would train on tokens the model never saw; a model that is elsewhere is skipped."""
    path = local_model(run.config, tokenizer=True)
    if run.value(_CHECK_MODE) == "disable" or path is None:
        return
    run.require_stack()
    from verl_multiturn.verl_bridge.model.chat_setup import examine_model

    rules = examine_model(
        run.model, run.multi_turn.format, tools=bool(run.multi_turn.enable), **_template_settings(run.config)
    )
    check_user_turns(str(path), rules, run.settings)
    known = [rule for rule in rules if rule.verdict is RuleEffect.KNOWN]
    if known:
        listed = "; ".join(f"{rule.name}: {rule.found}" for rule in known)
        print(f"verl-multiturn: chat template of {str(path)!r}: {listed}", file=sys.stderr)
    if refused := refusals(rules):
        raise ConfigError(
            f"the chat template of {str(path)!r} cannot be trained on: {refused}. Use another model, format or "
            f"template (`verl-multiturn doctor --model {path}` shows every rule), or, at your own risk, "
            "rollout.multi_turn.tokenization_sanity_check_mode=disable"
        )


def _template_settings(config: DictConfig) -> dict[str, Any]:
    from verl_multiturn.verl_bridge.model.processors import plain_dict

    return {
        "template_kwargs": plain_dict(config.data.get("apply_chat_template_kwargs")),
        "mm_processor_kwargs": plain_dict(config.data.get("mm_processor_kwargs")),
    }


def check_user_turns(model: str, rules: Sequence[Rule], settings: MultiTurnSettings) -> None:
    """Refuse interactions with a chat template in which no user turn can follow a turn of the assistant's.

    Args:
        model: Folder of the model, for the message.
        rules: The rules that its template keeps or breaks.
        settings: Our settings.
    """
    found = next((rule.found for rule in rules if rule.found.startswith(NO_USER_TURN)), None)
    if found is not None and settings.interaction_config_path is not None:
        raise ConfigError(
            f"{_INTERACTIONS}={settings.interaction_config_path!r}: with the chat template of "
            f"{model!r} {found}; use another model, or leave the interactions out"
        )


def check_interactions(run: RunView) -> None:
    """Refuse interactions that cannot be loaded, and local data rows that name others or give them wrong arguments.

    Without interactions, rows that hide a tool are refused: nothing could show it. So are rows that end in the
    assistant's answer: there is no next speaker.

    Rows of a data set class of the user's own, and of files that are not local parquet files, are looked at only when
    their conversation begins.
    """
    interactions = run.interactions
    if run.value("data.custom_cls.path"):
        return
    for key in ("data.train_files", "data.val_files"):
        listed = run.value(key)
        for file in [listed] if isinstance(listed, str) else list(listed or []):
            path = Path(str(file)).expanduser()
            if path.suffix != ".parquet" or not path.is_file():
                continue
            columns = ["extra_info"] if "extra_info" in _columns(path) else []
            greets = _ends_in_answers(path)
            hides = bool(columns) and f"{SHOWN}: bool" in str(pyarrow.parquet.read_schema(path).field(columns[0]).type)
            if not interactions and not hides and not any(greets):
                continue
            rows = pyarrow.parquet.read_table(path, columns=columns).to_pylist() if columns else [{}] * len(greets)
            for index, row in enumerate(rows):
                where = f"{path}: row {index}"
                interaction, _ = interaction_of_row(row, interactions, where)
                if greets[index] and run.has_our_loop and not run.has_agents:
                    check_last_speaker([{"role": "assistant"}], interaction is not None, where)


def _ends_in_answers(path: Path) -> list[bool]:
    """Return for each row of a Parquet file whether its prompt ends in an assistant's message."""
    column = pyarrow.parquet.read_schema(path).field("prompt").type if "prompt" in _columns(path) else None
    if column is None or not (pyarrow.types.is_list(column) or pyarrow.types.is_large_list(column)):
        return [False] * pyarrow.parquet.read_metadata(path).num_rows
    if not pyarrow.types.is_struct(column.value_type) or column.value_type.get_field_index("role") < 0:
        return [False] * pyarrow.parquet.read_metadata(path).num_rows
    found: list[bool] = []
    for chunk in pyarrow.parquet.read_table(path, columns=["prompt"]).column("prompt").chunks:
        roles = chunk.values.field("role")
        for first, last in itertools.pairwise(chunk.offsets.to_pylist()):
            found.append(last > first and roles[last - 1].as_py() == "assistant")
    return found


def _columns(path: Path) -> list[str]:
    return list(pyarrow.parquet.read_schema(path).names)


def check_tools(run: RunView) -> None:
    """Refuse tools that cannot be loaded, or have a name that the model could not write in a call."""
    path, _ = run.tool_files
    if run.is_early and path and not run.will_be_made(path) and not Path(path).is_file():
        load_tools(path)  # which raises the error
    run.require_stack()
    check_tool_names(run, run.tools)


def check_tool_names(run: RunView, tools: Mapping[str, Any]) -> None:
    """Refuse tools with names that no model could write; skipped when the model does not lie on this machine.

    Args:
        run: The run.
        tools: Its tools, by name.
    """
    config = run.config
    names = [name for tool in tools.values() for name in must_stay(schema_of(tool).as_dict())]
    # Names of letters, digits and the like hold no control token, so the tokenizer need not be loaded.
    plain = all(re.fullmatch(r"[\w .-]*", name) for name in names)
    if plain or config.actor_rollout_ref.rollout.multi_turn.format == TIR:
        return
    if local_model(config, tokenizer=True) is not None:
        from verl_multiturn.verl_bridge.model.chat_setup import chat_of, check_names

        check_names(chat_of(run.model, **_template_settings(config)).codec, tools.values())


def _has_no_tools(run: RunView) -> bool:
    return bool(run.multi_turn.enable) and not any(run.tool_files) and not run.is_set(_INTERACTIONS)


def _cut_tools(run: RunView) -> str:
    """Return the tools that keep longer answers than a conversation shows; empty: none."""
    if run.settings.observation_length is not None:
        return ""
    told = {name: limits_of(tool, CallLimits) for name, tool in run.tools.items()}
    most = run.multi_turn.max_tool_response_length
    return ", ".join(
        f"tool {name!r} keeps limits.response_characters={limits.response_characters}"
        for name, limits in told.items()
        if "response_characters" in limits.model_fields_set and limits.response_characters > most
    )


def _lacks_code_tool(run: RunView) -> dict[str, list[str]] | None:
    """Return the tools of text mode where none takes code. Several may, since each row may select one of them."""
    if not run.is_text_mode or not any(run.tool_files):
        return None
    takes = any(takes_code(schema_of(tool).as_dict()) for tool in run.tools.values())
    return None if takes else {"tools": sorted(run.tools)}


CONVERSATIONS: list[Check] = [
    check_call_format,
    _dead("use_inference_chat_template", "leave it out: the chat template of the model is always used"),
    _dead("num_repeat_rollouts", "leave it out, and set rollout.n"),
    RefusalRow(
        IMAGES,
        when=lambda run: run.engine_images and run.value(IMAGES) and run.value(IMAGES) != run.engine_images,
        why="data.mm_processor_kwargs asks for {run.engine_images}, so that engine and trainer would see other images",
        remedy="leave the first out",
    ),
    RefusalRow(
        _CHECK_MODE,
        when=lambda run: run.multi_turn.get("tokenization_sanity_check_mode", "strict") not in _CHECK_MODES,
        why=f"expected one of {list(_CHECK_MODES)}",
        remedy="choose one of them",
    ),
    check_template,
    RefusalRow(
        f"{PATH}.interaction_reward.mode",
        when=lambda run: run.is_set(f"{PATH}.interaction_reward.mode") and not run.is_set(_INTERACTIONS),
        why="the run has no interactions",
        remedy=f"set {_INTERACTIONS}, or the mode to none",
    ),
    RefusalRow(
        _INTERACTIONS,
        when=lambda run: run.is_set(_INTERACTIONS) and run.is_text_mode,
        why=f"in text mode (multi_turn.format={TIR}) a conversation is one text without turns that a user could answer",
        remedy="use another format, or leave the interactions out",
    ),
    check_interactions,
    RefusalRow(
        f"{_MULTI_TURN}.enable",
        when=lambda run: _has_no_tools(run) and not run.has_agents,
        why="neither rollout.multi_turn.tool_config_path nor function_tool_path names tools, and "
        f"{_INTERACTIONS} no interactions",
        remedy="set one of them, or multi_turn.enable=False",
    ),
    RefusalRow(
        f"{PATH}.turns_reminder",
        when=lambda run: run.settings.turns_reminder and run.multi_turn.max_assistant_turns is None,
        why="multi_turn.max_assistant_turns is null, so no turns can be counted down",
        remedy="set it, or leave the reminder out",
    ),
    RefusalRow(
        f"{_MULTI_TURN}.format",
        when=_lacks_code_tool,
        why="none of the tools {found[tools]} requires a string `code` and nothing else",
        remedy="add one that runs code, as in tool_configs/python.yaml",
    ),
    check_tools,
    RefusalRow(
        _RESPONSE_LENGTH,
        when=_cut_tools,
        why="{found}, of which the model sees no more than that",
        remedy=f"raise it, or set {PATH}.observation_length",
        is_refusal=False,
    ),
]

_RATE = f"{_ROLLOUT}.over_sample_rate"
_NOT_OURS = (
    "it has no effect, since no row is known to use the agent loop {AGENT_LOOP}",
    f"set {_ROLLOUT}.agent.default_agent_loop={{AGENT_LOOP}}, or leave it out",
)
OTHER_LOOPS = [
    *set_beside(
        [f"{PATH}.max_staleness", f"{PATH}.reference_reset", f"{PATH}.ratio_level", _INTERACTIONS],
        lambda run: True,
        *_NOT_OURS,
    ),
    RefusalRow(_RATE, lambda run: run.runs_our_server and run.value(_RATE), *_NOT_OURS),
    RefusalRow(
        "algorithm.adv_estimator",
        when=lambda run: run.counts_conversations,
        why="it counts conversations, which only the agent loop {AGENT_LOOP} or {PROXY_LOOP} has",
        remedy="use one of them, or an estimator of verl",
    ),
]
