"""Messages of the start-up check about simulated users and environments."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.integration.test_refusals import RIGHT, ROLLOUT
from tests.support.template_play import template_of
from tests.trainer_config import compose_config
from verl_multiturn import ConfigError, Interaction, Reply
from verl_multiturn.chat.template import examine_template
from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.interactions.policy_user import PolicyUser
from verl_multiturn.verl_bridge.startup.configuration import prepare_config
from verl_multiturn.verl_bridge.startup.refusals.loops import check_user_turns

pytestmark = pytest.mark.stack

OURS = f"+{ROLLOUT}.custom.multiturn"


class Counts(Interaction):
    def reply(self, instance_id: str, messages: Any, *, upto: int = 3) -> Reply:
        return Reply("and on")


def prepared(folder: Path, yaml: str = "", rows: list[Any] | None = None, **changes: str) -> Any:
    settings = {**RIGHT, "ray_kwargs.ray_init.num_cpus": "64", **changes}
    if yaml:
        path = folder / "users.yaml"
        path.write_text(yaml)
        settings[f"{OURS}.interaction_config_path"] = str(path)
    if rows is not None:
        data = folder / "rows.parquet"
        pd.DataFrame({"prompt": [[]] * len(rows), "extra_info": rows}).to_parquet(data)
        settings["data.train_files"] = settings["data.val_files"] = str(data)
    config = compose_config([f"{key}={value}" for key, value in settings.items()])
    prepare_config(config)
    return config


ONE = f"interaction: [{{class_name: {__name__}.Counts}}]"
TWO = f"interaction: [{{class_name: {__name__}.Counts, name: a}}, {{class_name: {__name__}.Counts, name: b}}]"


HIDES = [{"tools_kwargs": {"calc_gsm8k_reward": {"shown": shown}}} for shown in (True, False)]


def test_a_run_with_interactions_and_without_tools(tmp_path: Path) -> None:
    no_tools = {f"{ROLLOUT}.multi_turn.tool_config_path": "null"}
    rows = [{"interaction_kwargs": {"counts": {"upto": 2}}}, {"interaction_kwargs": None}]
    config = prepared(tmp_path, ONE, rows, **no_tools)
    assert config.actor_rollout_ref.rollout.custom.multiturn.interaction_config_path == str(tmp_path / "users.yaml")
    with pytest.raises(ConfigError, match=r"names tools, and .*interaction_config_path no interactions"):
        prepared(tmp_path, **no_tools)


@pytest.mark.parametrize(
    ("yaml", "rows", "changes", "said"),
    [
        (ONE.replace("Counts", "Count"), None, {}, "has no 'Count'; did you mean 'Counts'"),
        (TWO.replace("name: b", "name: a"), None, {}, "the name 'a' is used twice"),
        (TWO, [{"index": 0}], {}, r"rows.parquet: row 0: interaction_kwargs names none of .*\['a', 'b'\]; name one"),
        (ONE, [{"interaction_kwargs": {"name": "count"}}], {}, "row 0: .*'count', which is no interaction of the YAML"),
        (ONE, [{"interaction_kwargs": {"counts": {"to": 1}}}], {}, "row 0: interaction 'counts': reply.*'to'"),
        (
            "",
            HIDES,
            {},
            r"rows.parquet: row 1: tools_kwargs\['calc_gsm8k_reward'\]\['shown'\] is False, .*no interaction",
        ),
        ("", None, {f"{OURS}.interaction_reward.mode": "add"}, "interaction_reward.mode='add': the run has no"),
        (ONE, None, {f"{ROLLOUT}.multi_turn.format": "tir"}, "in text mode .* a conversation is one text"),
        (ONE, None, {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}, "interaction_config_path=.*has no effect"),
        (ONE, None, {f"{OURS}.interaction_reward.mode": "replace", f"{OURS}.otc.form": "ppo"}, "scales what compute"),
        (ONE, None, {f"{OURS}.user_turn_length": "0"}, "user_turn_length: Input should be greater than 0"),
    ],
)
def test_what_is_refused(yaml: str, rows: list[Any] | None, changes: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, yaml, rows, **changes)


@pytest.mark.parametrize("columns", [["prompt"], ["prompt", "extra_info"]])
def test_a_greeting_needs_a_user(columns: list[str], tmp_path: Path) -> None:
    data = tmp_path / "rows.parquet"
    question, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    rows = pd.DataFrame({"prompt": [[question], [question, answer], []], "extra_info": [{"index": 0}] * 3})
    rows[columns].to_parquet(data)
    files = {"data.train_files": str(data), "data.val_files": str(data)}
    with pytest.raises(ConfigError, match=r"rows.parquet: row 1 ends in the assistant's answer; leave it out, or put"):
        prepared(tmp_path, **files)
    prepared(tmp_path, ONE, **files)


@pytest.mark.parametrize(
    ("family", "refused"),
    [("gemma3", True), ("cohere2", True), ("phi3.5", True), ("qwen3", False), ("quickstart", False)],
)
async def test_families_in_which_no_user_turn_can_follow(family: str, refused: bool) -> None:
    template = template_of(family)
    rules = await examine_template(template)
    with pytest.raises(ConfigError, match="no user turn can follow") if refused else nullcontext():
        check_user_turns(family, rules, MultiTurnSettings(interaction_config_path="users.yaml"))
    check_user_turns(family, rules, MultiTurnSettings())  # without interactions any family will do


SEVERAL = {f"{OURS}.context.mode": "window", "algorithm.adv_estimator": "mt_grpo", f"{ROLLOUT}.n": "4"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{OURS}.context.turns": "2"}, "context.turns=2: it has no effect with .*context.mode=append"),
        ({**SEVERAL, f"{OURS}.context.summary_prompt": "Sum up"}, "nothing overflows; set the mode to overflow"),
        ({f"{OURS}.context.mode": "overflow", "algorithm.adv_estimator": "grpo"}, "adv_estimator=grpo counts each row"),
        ({**SEVERAL, "trainer.use_v1": "False"}, "only verl's own V1 trainers take it"),
        ({**SEVERAL, f"{OURS}.otc.form": "ppo"}, "otc.form=ppo scales the score of a single row"),
        ({**SEVERAL, f"{ROLLOUT}.multi_turn.max_assistant_turns": "null"}, "no length ends a conversation any more"),
        ({**SEVERAL, f"{ROLLOUT}.n": "1"}, "rollout.n=1: it compares conversations of one prompt"),
        (
            {f"{OURS}.advantage.gamma": "0.9"},
            "options=.*0.9.*: it has no effect with algorithm.adv_estimator=gae",
        ),
        ({f"{OURS}.context.mode": "windows"}, "context.mode: Input should be 'append', 'window' or 'overflow'"),
    ],
)
def test_several_rows_that_do_not_go_together(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    turns = {f"{ROLLOUT}.multi_turn.max_assistant_turns": "4"}

    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, **{**turns, **changes})


class Customer(PolicyUser):
    """A user with a name of its own for its role."""

    role = "customer"  # type: ignore[assignment]


class Game(PolicyUser):
    """A user that scores the conversation."""

    def score(self, instance_id: str) -> float:
        return 1.0


PLAYED = "interaction: [{class_name: verl_multiturn.interactions.policy_user.PolicyUser, config: {persona: x}}]"
TRAIN = {f"{OURS}.train": "[assistant,user]", "algorithm.adv_estimator": "mt_grpo", f"{ROLLOUT}.n": "4"}


SCORED = PLAYED.replace("verl_multiturn.interactions.policy_user.PolicyUser", f"{__name__}.Game")


def test_a_run_that_trains_the_user_too(tmp_path: Path) -> None:
    for mode in ("add", "replace"):
        prepared(tmp_path, SCORED, **{**TRAIN, f"{OURS}.interaction_reward.mode": mode})
    prepared(tmp_path, PLAYED, **TRAIN)
    prepared(tmp_path, PLAYED, **{**TRAIN, f"{OURS}.train": "[assistant]", "algorithm.adv_estimator": "grpo"})


@pytest.mark.parametrize(
    ("yaml", "changes", "said"),
    [
        (PLAYED, {f"{OURS}.train": "[user]"}, r"train: expected \[assistant\] or \[assistant, user\]"),
        (PLAYED, {f"{OURS}.train": "[assistant,judge]"}, "train.1: Input should be 'assistant' or 'user'"),
        (PLAYED, {f"{OURS}.proxy.roles": "[white]"}, "with proxy.roles=.*: a run has roles of one sort"),
        ("", {}, r"train=.*: it has no effect without .*interaction_config_path, whose users the policy may play"),
        (ONE, {}, "has no user whom the policy plays; name a PolicyUser there"),
        (
            PLAYED.replace("persona: x", "persona: x, temperature: 0.5"),
            {},
            "interaction 'policyuser': config.temperature is 0.5; a user that is trained .* samples as the assistant",
        ),
        (
            PLAYED.replace("verl_multiturn.interactions.policy_user.PolicyUser", f"{__name__}.Customer"),
            {},
            "interaction 'customer': its role is 'customer', expected 'user' or None; .*train trains no other",
        ),
        (
            SCORED,
            {},
            r"'game': Game.score gives rewards .*interaction_reward.mode=none only reports them",
        ),
        (PLAYED, {"algorithm.adv_estimator": "grpo"}, "adv_estimator=grpo compares all rows of a prompt"),
        (PLAYED, {f"{OURS}.context.mode": "window"}, "the user's view of a conversation is appended to alone"),
        (PLAYED, {f"{OURS}.otc.form": "ppo"}, "train=.*: .*otc.form=ppo scales the score of a single row"),
        (PLAYED, {"trainer.use_v1": "False"}, "only verl's own V1 trainers take it"),
        (PLAYED, {"critic.enable": "True"}, "mt_grpo uses no critic"),
        (PLAYED, {f"{ROLLOUT}.agent.default_agent_loop": "recorded_agent"}, "a record has one reward for the whole"),
    ],
)
def test_a_trained_user_that_does_not_go_together(
    yaml: str, changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, yaml, **{**TRAIN, **changes})
