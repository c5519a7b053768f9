"""`setting_differences`: the words of a run that an evaluation of it leaves out, and that change what it finds."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_multiturn.config import PATH, read_settings
from verl_multiturn.describe import printable
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import Model
from verl_multiturn.runs.checkpoint_evaluations import NOT_ASKED, started_as
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import SHORT, RunPlan, without_groups

_OF_REWARDS = ("reward", "reward_model", "custom_reward_function")
_OF_ROLLOUTS = ("prompt_length", "response_length", "multi_turn", "agent", "val_kwargs")
_OF_TRAINING = frozenset({
    "record_dir", "record_share", "record_max_gb", "record_redact", "certificate_share", "max_staleness",
    "staleness_strategy", "filter", "importance_weight", "old_log_prob_bound", "prefix_tree", "silent_settings",
    "near_rewards", "otc", "advantage", "checkpoint_evaluation", "cache",
})  # fmt: skip
"""Settings of ours that change neither a conversation of an evaluation nor its score."""
_OF_SPEED = frozenset({"train_batch_size", "gen_batch_size", "val_batch_size", "dataloader_num_workers"})
"""Settings below `data` that change no row."""


def setting_differences(model: Model, plan: RunPlan, given: Collection[str] = ()) -> str:
    """Return a sentence about the settings of a model's run that an evaluation does not have; `eval` prints it.

    They are the words that the run was started with (overrides, variants, `smoke=cpu`), where they change rewards or
    conversations of this evaluation. Words that its recipe cannot take are none of them.

    Args:
        model: The model.
        plan: The evaluation.
        given: Names in `val_kwargs` that options of the evaluation set.

    Returns:
        The sentence, with the options that take the settings over; empty: there are none, or the run is not known or
        somebody else's.

    Raises:
        ConfigError: The evaluation's own configuration cannot be composed.
    """
    if model.run is None or not model.is_own:
        return ""
    try:
        _, words = started_as(model.run)
        words = list({word.partition("=")[0]: word for word in words}.values())  # the last of a key wins
    except ConfigError as error:
        return f"whether the run had other settings than this evaluation is not known: {error}"
    there = {word.lstrip("+") for word in plan.overrides}
    left_out = [word for word in words if not word.lstrip("+~").startswith(NOT_ASKED) and word.lstrip("+") not in there]
    before = _settings(plan, given) if left_out else {}
    taken: list[str] = []
    found: list[str] = []
    for word in left_out:
        try:
            after = _settings(_with(plan, [*taken, word]), given)
        except ConfigError:
            continue
        taken.append(word)
        if after != before:
            found.append(word)
        before = after
    if not found:
        return ""
    options = " ".join(f"--set {shlex.quote(printable(_in_short(word)))}" for word in found)
    return (
        f"{printable(model.run.name)} was started with settings that this evaluation does not have, and its rewards or "
        f"conversations may be others; to take them over, add: {options}"
    )


def words_that_change(plan: RunPlan, words: Sequence[str]) -> list[str]:
    """Return the words that change the rows of an evaluation, its conversations or rewards, in the short form.

    An evaluation by name calls it, to name the departures from the benchmark's protocol.

    Args:
        plan: The evaluation without them.
        words: Hydra overrides, as `RunPlan.overrides` has them.

    Raises:
        ConfigError: One does not fit the recipe.
    """
    found, before = [], _settings(plan, (), has_rows=True) if words else {}
    for word in words:
        plan = replace(plan, overrides=(*plan.overrides, word))
        after = _settings(plan, (), has_rows=True)
        if after != before:
            found.append(_in_short(word))
        before = after
    return found


def _in_short(word: str) -> str:
    """Return a word with the short form of the path of our settings."""
    key = word.lstrip("+")
    return f"{SHORT}.{key.removeprefix(f'{PATH}.')}" if key.startswith(f"{PATH}.") else word


def _with(plan: RunPlan, words: Sequence[str]) -> RunPlan:
    """Return an evaluation with words of the run; the evaluation's own come last and win."""
    variants, smoke, others = without_groups((), plan.smoke, words)
    variants = list(dict.fromkeys([*variants, *plan.variants]))
    return replace(plan, variants=tuple(variants), smoke=smoke, overrides=(*others, *plan.overrides))


def _settings(plan: RunPlan, given: Collection[str], *, has_rows: bool = False) -> dict[str, Any]:
    """Return the settings of an evaluation that change its conversations or their rewards, and those of its rows."""
    config = resolved(compose_run(plan))
    rollout = config["actor_rollout_ref"]["rollout"]
    ours = read_settings((rollout.get("custom") or {}).get("multiturn")).model_dump()
    found: dict[str, Any] = {name: config.get(name) for name in _OF_REWARDS}
    found |= {name: rollout.get(name) for name in _OF_ROLLOUTS}
    found["val_kwargs"] = {key: value for key, value in (found["val_kwargs"] or {}).items() if key not in given}
    found["multiturn"] = {key: value for key, value in ours.items() if key not in _OF_TRAINING}
    found["template"] = config["data"].get("apply_chat_template_kwargs")
    if has_rows:
        found["data"] = {key: value for key, value in config["data"].items() if key not in _OF_SPEED}
        found |= {key: config["recipe"].get(key) for key in ("prepare", "prepare_data")}
    return {name: _without_workers(value) for name, value in found.items()}


def _without_workers(value: Any) -> Any:
    """Return a section without its number of workers, which changes speed alone."""
    return {key: item for key, item in value.items() if key != "num_workers"} if isinstance(value, Mapping) else value
