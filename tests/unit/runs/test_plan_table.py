"""The table of `run NAME --check`: the plan of a run, without verl."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.verl_bridge.names import MEASURED_ROWS
from verl_multiturn.verl_bridge.startup.plan_table import facts_of, lines_of, parameters_of
from verl_multiturn.verl_bridge.startup.view import RunView

MODEL = ROOT / "recipes" / "quickstart" / "model"


def facts(tmp_path: Path, *words: str, recipe: str = "quickstart") -> dict[str, Any]:
    return facts_of(RunView(compose_run(plan_run(recipe, out=tmp_path / "out", overrides=words)), is_early=True))


def tensors(path: Path, **shapes: list[int]) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_parameters_are_counted_in_the_headers(tmp_path: Path) -> None:
    assert parameters_of(tmp_path) is None
    tensors(tmp_path / "model-1.safetensors", a=[2, 3], b=[4])
    tensors(tmp_path / "model-2.safetensors", c=[10, 10])
    assert parameters_of(tmp_path) == 110
    (tmp_path / "model-3.safetensors").write_bytes(b"cut")
    assert parameters_of(tmp_path) is None


def test_what_the_quickstart_is(tmp_path: Path) -> None:
    found = facts(tmp_path, "trainer.total_training_steps=20", "trainer.device=cpu")
    config = OmegaConf.load(ROOT / "recipes" / "quickstart" / "config.yaml")
    assert found["turns"] == config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 3
    assert found["parameters"] == parameters_of(MODEL) > 100_000
    assert (found["steps"], found["gpus"], found["rows"]) == (20, 1, None)
    lines = lines_of(found)
    assert lines["rows"] == "training not known from here, validation not known from here"
    assert lines["memory of a GPU (estimate)"] == "none, on a CPU"
    assert lines["steps"] == "20"
    assert lines["left to the start"] == "the rows, which are not made yet (--prepare --check makes them)"
    there = {**found, "rows": 8, "cluster": "head:6379", "device": "cuda", "parameters": None}
    for text in (
        "the logical CPUs of Ray's cluster at head:6379",
        "the model's files",
        "`verl-multiturn doctor --gpu`",
    ):
        assert text in lines_of(there)["left to the start"]
    assert "rows" not in lines_of(there)["left to the start"]


PROXY = "actor_rollout_ref.rollout.custom.multiturn.proxy"


def test_roles_opponents_and_options_are_shown(tmp_path: Path) -> None:
    found = facts(
        tmp_path, f"{PROXY}.train=[white]", f"++{PROXY}.opponents={{black: [policy, 0, 'http://127.0.0.1:8/v1']}}",
        "algorithm.adv_estimator=my_advantages.py:advantages",
        "++actor_rollout_ref.rollout.custom.multiturn.advantage.options={scale: 2}",
        recipe="tictactoe",
    )  # fmt: skip
    assert (found["roles"], found["trained_roles"]) == (["white", "black"], ["white"])
    assert found["opponents"] == {"black": ["policy", "step 0", "http://127.0.0.1:8/v1"]}
    lines = lines_of(found)
    assert lines["roles"] == "white, black (not trained)"
    assert lines["opponents of black"] == "policy, step 0, http://127.0.0.1:8/v1"
    assert lines["estimator, KL"].startswith("my_advantages.py:advantages (scale=2), ")


def test_the_roles_of_conversations_are_shown(tmp_path: Path) -> None:
    users = tmp_path / "users.yaml"
    users.write_text(
        "interaction: [{class_name: verl_multiturn.interactions.policy_user.PolicyUser, config: {persona: Ann.}}]"
    )
    ours = "++actor_rollout_ref.rollout.custom.multiturn"
    words = (f"{ours}.train=[assistant,user]", f"{ours}.interaction_config_path={users}")
    found = facts(tmp_path, *words, "algorithm.adv_estimator=mt_grpo")
    assert (found["roles"], found["trained_roles"], found["opponents"]) == (["assistant", "user"],) * 2 + ({},)
    assert lines_of(found)["roles"] == "assistant, user"
    assert (found["tool_reward"], found["interaction_reward"]) == ("none", "none")
    assert lines_of(found)["interaction_reward.mode"] == "none (these rewards are only reported)"
    found = facts(tmp_path, *words, f"{ours}.interaction_reward.mode=add", f"{ours}.tool_reward.mode=replace")
    assert lines_of(found)["interaction_reward.mode"] == "add (to the reward)"
    assert lines_of(found)["tool_reward.mode"] == "replace (the reward)"


def test_tools_and_interactions_are_shown(tmp_path: Path) -> None:
    plain = {"tools", "interaction"}
    assert not plain & set(lines_of(facts(tmp_path, "actor_rollout_ref.rollout.multi_turn.tool_config_path=null")))
    users = tmp_path / "users.yaml"
    users.write_text(
        "interaction: [{class_name: verl_multiturn.interactions.scripted_user.ScriptedUser}, "
        "{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, name: grade}]"
    )
    words = (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=my_tools.yaml",
        f"++actor_rollout_ref.rollout.custom.multiturn.interaction_config_path={users}",
    )
    early = facts(tmp_path, *words)
    assert (early["tools"], early["interactions"]) == (None, None)
    assert lines_of(early)["tools"] == "my_tools.yaml: not known from here"
    view = RunView(compose_run(plan_run("quickstart", out=tmp_path / "out", overrides=words)))
    view.__dict__["tools"] = {f"tool_{number}": None for number in range(20)}
    found = facts_of(view)
    assert len(found["tools"]) == 20
    kept = "verl_multiturn.interactions.old_verl.classes.Gsm8kInteraction"
    ours = "verl_multiturn.interactions.scripted_user.ScriptedUser"
    assert found["interactions"] == {"scripteduser": ours, "grade": kept}
    assert lines_of(found)["interaction"] == f"{users}: scripteduser ({ours}), grade ({kept})"
    assert lines_of(found)["tools"].startswith("my_tools.yaml: tool_0, tool_1, ")
    assert lines_of(found)["tools"].endswith(", tool_15 and 4 more")


def test_loss_context_and_teachers_are_shown(tmp_path: Path) -> None:
    lines = lines_of(facts(tmp_path))
    assert lines["policy loss"] == "vanilla, token-mean"
    assert not {"context", "distillation"} & set(lines)
    lines = lines_of(
        facts(
            tmp_path, "actor_rollout_ref.actor.policy_loss.loss_mode=mt_gspo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "++actor_rollout_ref.rollout.custom.multiturn.context={mode: window, weight: conversation}",
            "distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=/models/big",
        )
    )  # fmt: skip
    assert lines["policy loss"] == "mt_gspo, seq-mean-token-mean"
    assert lines["context"] == "window, weight of a row: conversation"
    assert lines["distillation"] == "k3, from /models/big"
    told = facts(tmp_path, "distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False")
    assert lines_of(told)["policy loss"] == "none (distillation without task rewards), token-mean"


def test_the_reward_function_and_its_options_are_shown(tmp_path: Path) -> None:
    lines = lines_of(facts(tmp_path))
    assert not {"roles", "interaction_reward.mode"} & set(lines)
    assert lines["reward"] == f"{ROOT / 'recipes' / 'quickstart' / 'reward.py'}:compute_score"
    section, ours = "reward.custom_reward_function", "pkg://verl_multiturn.rewards:compute_score"
    words = [f"{section}.path=pkg://verl_multiturn.rewards"]
    assert lines_of(facts(tmp_path, *words))["reward"] == ours
    words += [f"+{section}.reward_kwargs.routes={{a: math}}", f"+{section}.reward_kwargs.gsm8k.method=flexible"]
    assert lines_of(facts(tmp_path, *words))["reward"] == f"{ours} (gsm8k, routes); a: math"
    assert lines_of(facts(tmp_path, f"{section}.path=null"))["reward"] == "verl's own, by data_source"


def test_rows_that_verl_filters_are_the_most(tmp_path: Path) -> None:
    """The start-up check sets a data set class of ours where verl measures prompts."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": []}\n' * 40)
    files = (f"data.train_files={rows}", f"data.val_files={rows}", "trainer.total_training_steps=null")
    words = (*files, "trainer.total_epochs=3", "data.train_batch_size=16")
    filtered = (*words, "data.filter_overlong_prompts=True", f"data.custom_cls.path={MEASURED_ROWS[0]}")
    lines = lines_of(facts(tmp_path, *filtered, recipe="gsm8k_multiturn"))
    assert lines["rows"] == "training 40, validation 40, before verl leaves out prompts that are too long"
    assert lines["steps"] == "at most 6"
    assert "the number of rows that verl leaves out for their long prompts" in lines["left to the start"]
    assert "not made yet" not in lines["left to the start"]
    fixed = lines_of(facts(tmp_path, *filtered, "trainer.total_training_steps=2", recipe="gsm8k_multiturn"))
    assert fixed["steps"] == "2"
    whole = lines_of(facts(tmp_path, *words, "data.filter_overlong_prompts=False", recipe="gsm8k_multiturn"))
    assert (whole["rows"], whole["steps"]) == ("training 40, validation 40", "6")
    assert "rows" not in whole["left to the start"]


@pytest.mark.parametrize("word", ["data.custom_cls.path=mine.py", "data.train_files=hdfs://host/rows.parquet"])
def test_rows_that_are_not_looked_at_are_not_said_to_be_unmade(tmp_path: Path, word: str) -> None:
    later = lines_of(facts(tmp_path, word, "trainer.device=cpu"))["left to the start"]
    assert later == "the rows, which are elsewhere or which a data set class of your own reads"


def test_steps_follow_from_the_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": []}\n' * 40)
    files = (f"data.train_files={rows}", f"data.val_files={rows}", "trainer.total_training_steps=null")
    found = facts(tmp_path, *files, "trainer.total_epochs=3", "data.train_batch_size=16", recipe="gsm8k_multiturn")
    assert (found["rows"], found["steps"]) == (40, 6)


@pytest.mark.parametrize(
    ("words", "trainer_gib"),
    [
        ((), 16.5),
        (("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",), 8.5),
        (("actor_rollout_ref.actor.use_kl_loss=True",), 20.5),
        (("trainer.n_gpus_per_node=2",), 8.5),
        (("actor_rollout_ref.model.lora_rank=8",), 4.5),
    ],
)
def test_the_memory_of_a_gpu_follows_the_formula(tmp_path: Path, words: tuple[str, ...], trainer_gib: float) -> None:
    """The model has 2**30 parameters, and 128 layers of 1,024; the micro-batch has 1,024 tokens."""
    model = tmp_path / "model"
    model.mkdir()
    tensors(model / "model.safetensors", a=[2**15, 2**15])
    vocabulary = 43_690  # × 6 bytes × 1,024 tokens are a quarter of a GiB, as the activations are
    (model / "config.json").write_text(
        json.dumps({"hidden_size": 1024, "num_hidden_layers": 128, "vocab_size": vocabulary})
    )
    actor, offloads = "actor_rollout_ref.actor", ("param_offload", "optimizer_offload")
    base = [
        f"actor_rollout_ref.model.path={model}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=1024",
        f"{actor}.use_kl_loss=False",
        "actor_rollout_ref.ref.fsdp_config.param_offload=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        *(f"{actor}.fsdp_config.{name}=False" for name in offloads),
    ]
    found = facts(tmp_path, *base, *words, recipe="gsm8k_multiturn")
    assert found["trainer_gib"] == trainer_gib
    assert found["checkpoint_gib"] == 12.0
