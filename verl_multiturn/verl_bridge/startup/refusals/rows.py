"""Refusals about conversations of several rows, void turns, and the estimators that count conversations."""

from __future__ import annotations

from omegaconf import OmegaConf

from verl_multiturn.advantages.estimators import ESTIMATORS as OURS
from verl_multiturn.advantages.estimators import load_estimator
from verl_multiturn.config import PATH, USER, AdvantageSettings
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.verl_bridge.names import RECORDED_LOOP
from verl_multiturn.verl_bridge.settings import divides_by_deviation, may_have_several_rows
from verl_multiturn.verl_bridge.startup.needs import has_weight
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer, set_beside
from verl_multiturn.verl_bridge.startup.verl_classes import ROLLOUT, default_of
from verl_multiturn.verl_bridge.startup.view import RunView

_CONTEXT = f"{PATH}.context"
_ESTIMATOR = "algorithm.adv_estimator"


def check_options(run: RunView) -> None:
    """Refuse an option that an estimator of ours does not take; `own_code.py` checks those of a run's own function."""
    if run.estimator in OURS:
        load_estimator(run.estimator, run.settings, divides_by_deviation(run.config))


def _has_several(run: RunView) -> bool:
    return run.settings.context.mode != "append"


def _trains_user(run: RunView) -> bool:
    return run.settings.trains_user


def check_trained_users(run: RunView) -> None:
    """Refuse `train` without a user whom the policy plays, another role, another temperature, and scores without use.

    The trainer computes all log-probabilities with the run's temperature.
    """
    path = run.settings.interaction_config_path
    if not run.settings.trains_user or path is None:
        return
    loaded = run.interactions
    for name, each in loaded.items():
        if each.role not in (None, USER):
            raise ConfigError(
                f"interaction {name!r}: its role is {show(each.role)}, expected {USER!r} or None; {_TRAIN} trains no "
                "other"
            )
    users = {name: each for name, each in loaded.items() if each.role == USER}
    if not users:
        raise ConfigError(
            f"{_TRAIN} names {USER!r}, and {path} has no user whom the policy plays; name a PolicyUser there, or leave "
            "it out"
        )
    temperature = run.rollout.get("temperature", 1.0)
    for name, each in users.items():
        own = getattr(each, "temperature", temperature)
        if own != temperature:
            raise ConfigError(
                f"interaction {name!r}: config.temperature is {own:g}; a user that is trained ({_TRAIN}) samples as "
                f"the assistant does: set it to rollout.temperature, which is {temperature:g}"
            )
        if run.settings.interaction_reward.mode == "none" and type(each).score is not Interaction.score:
            raise ConfigError(
                f"interaction {name!r}: {type(each).__name__}.score gives rewards to those that {_TRAIN} trains, "
                f"and {PATH}.interaction_reward.mode=none only reports them; set it to replace or add, or leave the "
                "method out"
            )


_TRAIN = f"{PATH}.train"
_USER: list[Check] = [
    *set_beside(
        [_TRAIN],
        when=lambda run: run.settings.interaction_config_path is None,
        why="it has no effect without {PATH}.interaction_config_path, whose users the policy may play",
        remedy="name a PolicyUser there, or leave it out",
    ),
    RefusalRow(
        (_TRAIN, f"{_CONTEXT}.mode"),
        when=lambda run: _trains_user(run) and _has_several(run),
        why="the user's view of a conversation is appended to alone",
        remedy="set the mode to append, or train the assistant alone",
    ),
    RefusalRow(
        _TRAIN,
        when=lambda run: _trains_user(run) and not run.counts_conversations,
        why="each speaker has rows of its own, and algorithm.adv_estimator={run.estimator} compares all rows of a "
        "prompt",
        remedy="set it to {ESTIMATORS} or a function of your own, or train the assistant alone",
    ),
    needs_our_trainer(_TRAIN, _trains_user, "train the assistant alone"),
    RefusalRow(
        _TRAIN,
        when=lambda run: _trains_user(run) and run.settings.otc.form != "none",
        why="{PATH}.otc.form={run.settings.otc.form} scales the score of a single row",
        remedy="set the form to none, or train the assistant alone",
    ),
    RefusalRow(
        _TRAIN,
        when=lambda run: _trains_user(run) and run.is_text_mode,
        why="in text mode a conversation is one text, without a user",
        remedy="use another format, or leave it out",
    ),
    RefusalRow(
        (_TRAIN, "critic.enable"),
        when=lambda run: _trains_user(run) and run.asks_for_critic,
        why="{run.estimator} uses no critic, and its updates would be counted in rows",
        remedy="set critic.enable=False",
    ),
    RefusalRow(
        _TRAIN,
        when=lambda run: _trains_user(run) and RECORDED_LOOP in run.loops,
        why="a record has one reward for the whole conversation, and the agent loop recorded_agent would give it to "
        "both speakers",
        remedy="leave it out",
    ),
]

SEVERAL_ROWS: list[Check] = [
    *_USER,
    check_trained_users,
    *set_beside(
        [f"{_CONTEXT}.{name}" for name in ("turns", "summary_prompt", "summary_length")],
        when=lambda run: not _has_several(run),
        why="it has no effect with {PATH}.context.mode=append",
        remedy="set the mode to window or overflow, or leave it out",
    ),
    RefusalRow(
        f"{_CONTEXT}.summary_prompt",
        when=lambda run: run.settings.context.mode == "window" and run.settings.context.summary_prompt is not None,
        why="it has no effect with {PATH}.context.mode=window, where nothing overflows",
        remedy="set the mode to overflow, or leave it out",
    ),
    RefusalRow(
        f"{_CONTEXT}.mode",
        when=lambda run: _has_several(run) and not run.counts_conversations,
        why="conversations have several rows, and algorithm.adv_estimator={run.estimator} counts each row as a "
        "conversation",
        remedy="set it to {ESTIMATORS} or a function of your own, or the mode to append",
    ),
    needs_our_trainer(f"{_CONTEXT}.mode", _has_several, "set the mode to append"),
    RefusalRow(
        f"{_CONTEXT}.mode",
        when=lambda run: _has_several(run) and run.settings.otc.form != "none",
        why="{PATH}.otc.form={run.settings.otc.form} scales the score of a single row",
        remedy="set the form to none, or the mode to append",
    ),
    RefusalRow(
        f"{_CONTEXT}.mode",
        when=lambda run: _has_several(run) and run.is_text_mode,
        why="in text mode a conversation is one text, and no turn can be left out",
        remedy="set the mode to append",
    ),
    RefusalRow(
        f"{_CONTEXT}.mode",
        when=lambda run: (
            _has_several(run) and run.multi_turn.max_assistant_turns is None and run.multi_turn.max_user_turns is None
        ),
        why="no length ends a conversation any more, and neither multi_turn.max_assistant_turns nor max_user_turns "
        "does",
        remedy="set one of them",
    ),
    needs_our_trainer(
        f"{PATH}.void_turn_pattern", lambda run: run.settings.void_turn_pattern is not None, "leave the pattern out"
    ),
]

_TEACHER = "distillation.enabled"
_LOSS = "distillation.distillation_loss"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


def _teaches_several(run: RunView) -> bool:
    return bool(run.value(_TEACHER)) and may_have_several_rows(run.config, run.settings)


def _teacher_tokens(run: RunView, is_another: bool) -> dict[str, str] | None:
    """Return the first teacher of which one list of `RunView.teacher_tokens` has tokens; None without one."""
    for name, differing in run.teacher_tokens.items():
        if tokens := differing[not is_another]:
            given = f"distillation.teacher_models.{name}.model_path={run.teachers[name]!r}"
            return {"given": given, "tokens": f"{len(tokens)} of the policy's tokens ({show(tokens[0])} is one)"}
    return None


def _teachers_of_one_name(run: RunView) -> str:
    """Return the keys of two teachers whose servers would have one name in Ray; "" without such two."""
    of_names: dict[str, str] = {}
    for name in run.teachers if len(run.teachers) > 1 else ():
        path = f"distillation.teacher_models.{name}.key"
        if (key := run.value(path)) is None:
            continue
        shown = f"{path}={key!r}"
        if (other := of_names.setdefault(str(key).replace("/", "_"), shown)) != shown:
            return f"{other} with {shown}"
    return ""


def _random_teacher(run: RunView) -> str:
    """Return the setting by which the first such teacher has random weights; "" without one.

    verl's YAML file has `load_format: auto` for its own entry alone. Another entry has the default of a rollout, whose
    weights the trainer brings.
    """
    for name in run.teachers:
        key = f"distillation.teacher_models.{name}.inference.load_format"
        load_format = str(run.value(key) or default_of(ROLLOUT, "load_format"))
        if load_format.startswith("dummy"):
            return f"{key}={load_format!r}"
    return ""


def _short_teacher(run: RunView) -> dict[str, str | int] | None:
    """Return the first teacher that cannot read the longest row and sample a token; None without one."""
    if not run.teachers:
        return None
    run.require_stack()
    from verl_multiturn.verl_bridge.model.loading import most_tokens

    for name, path in run.teachers.items():
        entry = f"distillation.teacher_models.{name}"
        own, of_model = run.value(f"{entry}.inference.max_model_len"), most_tokens(OmegaConf.create({"path": path}))
        tokens = min((each for each in (own, of_model) if each), default=run.longest_row + 1)
        if tokens <= run.longest_row:
            return {"given": f"{entry}.model_path={path!r}", "tokens": tokens}
    return None


_DISTILLATION: list[Check] = [
    RefusalRow(
        "distillation.teacher_models.*.key",
        when=_teachers_of_one_name,
        given="{found}",
        why="verl names a teacher's servers by its key, with _ for /, and two servers of one name cannot start",
        remedy="give one of them another key, and write it into its rows' {run.config.distillation.teacher_key}",
    ),
    RefusalRow(
        "distillation.teacher_models.*.inference.load_format",
        when=_random_teacher,
        given="{found}",
        why="verl 0.9.1 starts this teacher with random weights, and nothing brings others",
        remedy="set it to auto",
    ),
    RefusalRow(
        "distillation.teacher_models.*.model_path",
        when=lambda run: _teacher_tokens(run, is_another=True),
        given="{found[given]}",
        why="its tokenizer has other ids for {found[tokens]}, and a teacher scores the policy's token ids",
        remedy="take a teacher with the policy's tokenizer",
    ),
    RefusalRow(
        "distillation.teacher_models.*.model_path",
        when=lambda run: _teacher_tokens(run, is_another=False),
        given="{found[given]}",
        why="its tokenizer does not have {found[tokens]} at their ids, and has not learned their probabilities",
        remedy="take a teacher with the policy's tokenizer",
        is_refusal=False,
    ),
    RefusalRow(
        "distillation.teacher_models.*.model_path",
        when=_short_teacher,
        given="{found[given]}",
        why="it takes one token less than {found[tokens]}, and a row may have {run.longest_row} "
        "(data.max_prompt_length + data.max_response_length): one that it cannot take ends the run",
        remedy="lower one of these lengths, or take a teacher for longer texts",
        is_refusal=False,
    ),
    RefusalRow(
        (_TEACHER, _MANAGER),
        when=lambda run: _teaches_several(run) and run.own_manager,
        why="conversations may have several rows here, and verl 0.9.1's own workers ask a teacher about the last one "
        "alone",
        remedy=f"leave {_MANAGER} out, or distillation",
    ),
    RefusalRow(
        (f"{_CONTEXT}.weight", f"{_LOSS}.use_task_rewards"),
        when=lambda run: (
            run.value(_TEACHER) and run.settings.context.weight != "row" and not run.value(f"{_LOSS}.use_task_rewards")
        ),
        why="it has no effect: it weighs advantages, and the loss against the teacher takes none",
        remedy="set the weight to row, or use_task_rewards=True",
    ),
    RefusalRow(
        (f"{_LOSS}.use_policy_gradient", "algorithm.rollout_correction.rollout_is"),
        when=lambda run: run.value(_TEACHER) and run.value(f"{_LOSS}.use_policy_gradient") and has_weight(run),
        why="verl 0.9.1 gives that loss the importance weights in a form in which it raises",
        remedy="set use_policy_gradient=False, or rollout_is=null",
    ),
    RefusalRow(
        ("actor_rollout_ref.rollout.temperature", _TEACHER),
        when=lambda run: run.value(_TEACHER) and run.rollout.get("temperature", 1.0) != 1.0,
        why="verl computes the policy's log-probs at this temperature, and its teacher's at 1.0, so that the loss of a "
        "policy that equals its teacher is not 0",
        remedy="set it to 1.0",
        is_refusal=False,
    ),
]

ESTIMATOR: list[Check] = [
    needs_our_trainer(_ESTIMATOR, lambda run: run.counts_conversations, f"set {_ESTIMATOR}=grpo"),
    RefusalRow(
        (_ESTIMATOR, "actor_rollout_ref.rollout.n"),
        when=lambda run: run.estimator in OURS and run.rollout.n < 2,
        why="it compares conversations of one prompt, and there is only one",
        remedy="set rollout.n to 2 or more",
    ),
    RefusalRow(
        "algorithm.gamma",
        when=lambda run: run.counts_conversations and run.value("algorithm.gamma") not in (None, 1.0),
        why="algorithm.adv_estimator={run.estimator} discounts turns, not tokens",
        remedy="leave it at 1.0, and set {PATH}.advantage.options.gamma where the estimator has that option",
    ),
    *set_beside(
        [f"{PATH}.advantage.{name}" for name in AdvantageSettings.model_fields],
        when=lambda run: not run.counts_conversations,
        why="it has no effect with algorithm.adv_estimator={run.estimator}",
        remedy="set the estimator to {ESTIMATORS} or a function of your own, or leave it out",
    ),
    check_options,
    *_DISTILLATION,
    RefusalRow(
        (f"{_CONTEXT}.mode", "critic.enable"),
        when=lambda run: _has_several(run) and run.asks_for_critic,
        why="{run.estimator} uses no critic, and its updates would be counted in rows",
        remedy="set critic.enable=False",
    ),
    needs_our_trainer(f"{_CONTEXT}.weight", lambda run: run.settings.context.weight != "row", "set the weight to row"),
]
