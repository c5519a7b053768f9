"""`mt_gspo` and `ratio_level`: taken by a start or refused by name; ratios of conversations become verl's `gspo`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
REJECTION = "algorithm.rollout_correction.rollout_rs"
TURNS, ROWS = f"{LOSS}=mt_gspo", f"{LOSS}=gspo"
CONVERSATION = f"+{PATH}.ratio_level=conversation"


def started(*words: str) -> Any:
    """Return the policy loss with which a run with these settings starts."""
    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.startup.needs import set_needs
    from verl_multiturn.verl_bridge.startup.refusals.loops import OTHER_LOOPS
    from verl_multiturn.verl_bridge.startup.refusals.policy_losses import POLICY_LOSSES
    from verl_multiturn.verl_bridge.startup.refusals.prefix_tree import PREFIX_TREE, is_on
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    loops = [] if any(word.startswith(LOOP) for word in words) else [in_loop("multiturn_agent")]
    config = compose_config([*loops, *words])
    run = RunView(config)
    other = Section("", OTHER_LOOPS, lambda run: not run.has_our_loop)
    check(run, [Section("", POLICY_LOSSES), Section("", PREFIX_TREE, is_on), other])
    set_needs(run)
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def in_loop(name: str) -> str:
    return f"{LOOP}={name}"


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ([TURNS], "mt_gspo"),
        ([TURNS, f"+{PATH}.ratio_level=turn"], "mt_gspo"),
        ([TURNS, f"+{PATH}.context.mode=window"], "mt_gspo"),
        ([TURNS, f"+{PATH}.prefix_tree='on'"], "mt_gspo"),
        ([TURNS, in_loop("tool_agent")], "mt_gspo"),
        ([TURNS, f"{REJECTION}=seq_mean_k1"], "mt_gspo"),
        ([ROWS, f"{REJECTION}=token_k1"], "gspo"),
        ([TURNS, CONVERSATION], "gspo"),
        ([ROWS, CONVERSATION], "gspo"),  # as in a second check of a run's own configuration
        ([TURNS, CONVERSATION, f"+{PATH}.prefix_tree='on'"], "gspo"),
        ([TURNS, CONVERSATION, in_loop("proxy_agent"), f"+{PATH}.proxy.max_rows=1"], "gspo"),
    ],
)
def test_a_level_that_can_be_had(words: list[str], loss: str) -> None:
    assert started(*words) == loss


SEVERAL = "conversations have several rows here, and a policy loss sees the rows of one micro-batch"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([CONVERSATION], f"ratio_level='conversation': it has no effect with {LOSS}='vanilla'; set that to mt_gspo"),
        ([TURNS, CONVERSATION, f"+{PATH}.context.mode=window"], SEVERAL),
        ([ROWS, CONVERSATION, f"+{PATH}.context.mode=overflow"], SEVERAL),
        ([TURNS, CONVERSATION, f"+{PATH}.train=[assistant,user]"], SEVERAL),
        ([TURNS, CONVERSATION, in_loop("proxy_agent")], SEVERAL),
        ([TURNS, CONVERSATION, in_loop("recorded_agent")], "a recorded conversation or session may have several rows"),
        ([TURNS, CONVERSATION, in_loop("tool_agent")], "no row is known to use the agent loop multiturn_agent"),
        ([TURNS, f"{REJECTION}=token_k1"], "rejected tokens would cut a turn into parts with ratios of their own"),
        ([TURNS, f"{REJECTION}='seq_mean_k1, token_k3'"], "rejected tokens would cut a turn into parts"),
    ],
)
def test_a_level_that_cannot_be_had_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        started(*words)
