"""Batch sizes that verl 0.9.1's V1 trainer cannot divide are refused at the start; those that it can divide are not."""

from typing import Any

import pytest

from tests.conftest import ROOT
from tests.trainer_config import compose_config
from verl_multiturn import ConfigError
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.first_run import overrides
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.verl_bridge.startup.refusals.trainer import BATCH_SIZES
from verl_multiturn.verl_bridge.startup.table import Section
from verl_multiturn.verl_bridge.startup.table import check as check_sections
from verl_multiturn.verl_bridge.startup.view import RunView

pytestmark = pytest.mark.stack

ACTOR = "actor_rollout_ref.actor"
N = "actor_rollout_ref.rollout.n"
LOG_PROBS = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
STEPS = "trainer.v1.separate_async.parameter_sync_step"
RIGHT: dict[str, Any] = {
    "data.train_batch_size": 64,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    "critic.ppo_mini_batch_size": 32,
    "critic.ppo_micro_batch_size_per_gpu": 8,
    N: 4,
    "trainer.n_gpus_per_node": 8,
    "algorithm.adv_estimator": "grpo",
}


def check_batch_sizes(config: Any) -> None:
    check_sections(RunView(config), [Section("", BATCH_SIZES)])


def check(**changes: Any) -> None:
    check_batch_sizes(compose_config([f"{key}={value}" for key, value in {**RIGHT, **changes}.items()]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.train_batch_size": 66},  # verl pads it to whole mini-batches
        {f"{ACTOR}.ppo_mini_batch_size": 2},
        {TENSOR_PARALLEL: 4},
        {f"{ACTOR}.ppo_mini_batch_size": 3, f"{ACTOR}.ulysses_sequence_parallel_size": 2, N: 8},
        {f"{ACTOR}.ppo_mini_batch_size": 31, N: 8},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5, f"{ACTOR}.use_dynamic_bsz": True},
        {"critic.ppo_mini_batch_size": 3},  # there is no critic
        {
            "model_engine": "megatron",
            f"{ACTOR}.ppo_mini_batch_size": 31,
            f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
        },
        {"trainer.v1.trainer_mode": "separate_async", STEPS: 2},
        {  # the trainer's GPU has no engine
            "trainer.v1.trainer_mode": "separate_async",
            STEPS: 2,
            "trainer.n_gpus_per_node": 1,
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.n_gpus_per_node": 2,
            TENSOR_PARALLEL: 2,
        },
        {"trainer.v1.trainer_mode": "colocate_async", "+trainer.v1.colocate_async.parameter_sync_step": 1},
    ],
)
def test_what_verl_divides_is_accepted(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    if changes.get(f"{ACTOR}.ppo_mini_batch_size") in (2, 3, 31):
        changes = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, **changes}
    check(**changes)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["ppo_max_token_len_per_gpu=1000", "log_prob_max_token_len_per_gpu=1000"]),
        ({"algorithm.rollout_correction.bypass_mode": True}, ["ppo_max_token_len_per_gpu=1000"]),
        ({LOG_PROBS: 1024}, ["ppo_max_token_len_per_gpu=1000"]),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 1024}, []),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, []),  # two ranks hold a row together
        ({"data.max_response_length": 400}, []),
        ({f"{ACTOR}.use_dynamic_bsz": False}, []),
        ({"model_engine": "megatron", f"{ACTOR}.megatron.context_parallel_size": 2}, []),
        (
            {"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2},
            ["ppo_max_token_len_per_gpu=1000", "log_prob_max_token_len_per_gpu=1000"],
        ),
        ({"model_engine": "torchtitan"}, []),  # its ranks are not looked at
    ],
)
def test_a_row_that_fits_into_no_micro_batch_is_told(
    changes: dict[str, Any], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    check(**{f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000, **changes})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].rpartition(".")[2] for line in lines] == told
    for line in lines:
        assert "a row may have 1024 tokens" in line
        assert "ends the run at the first one of more than 1000" in line


@pytest.mark.parametrize(("recipe", "settings"), [("quickstart", overrides("nvidia")), ("smollm2", [])])
def test_recipes_for_one_device_fit_on_one_gpu(recipe: str, settings: list[str]) -> None:
    check_batch_sizes(compose_run(plan_run(recipe, overrides=settings)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {f"{ACTOR}.ppo_mini_batch_size": 31},
            "actor.ppo_mini_batch_size=31 with actor_rollout_ref.rollout.n=4: a mini-batch has 124 rows, which cannot "
            "be divided equally among 8 data-parallel ranks; make 31 times 4 a multiple of 8",
        ),
        (
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5},
            "each of 8 data-parallel ranks gets 16 rows of a mini-batch, and actor_rollout_ref.actor."
            "ppo_micro_batch_size_per_gpu=5 does not divide them; choose a divisor of 16",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_mini_batch_size": 33, N: 2},
            "a mini-batch has 66 rows, which cannot be divided equally among 4 data-parallel ranks",
        ),
        (
            {"model_engine": "megatron", f"{ACTOR}.ppo_mini_batch_size": 31},
            "a mini-batch has 124 rows, which cannot be divided equally among 8 data-parallel ranks",
        ),
        (
            {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 3},
            "critic.ppo_mini_batch_size=3 with actor_rollout_ref.rollout.n=4: a mini-batch has 12 rows",
        ),
        (
            {"trainer.n_gpus_per_node": 1, TENSOR_PARALLEL: 2},
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2: an engine takes 2 GPUs, and trainer.nnodes=1 × "
            "trainer.n_gpus_per_node=1 gives 1, which is no multiple of it; engines of 1 GPU always fit",
        ),
        (
            {
                "trainer.v1.trainer_mode": "separate_async",
                STEPS: 2,
                "actor_rollout_ref.rollout.nnodes": 1,
                "actor_rollout_ref.rollout.n_gpus_per_node": 6,
                TENSOR_PARALLEL: 2,
                "actor_rollout_ref.rollout.data_parallel_size": 2,
            },
            "tensor_model_parallel_size=2 × actor_rollout_ref.rollout.data_parallel_size=2: an engine takes 4 GPUs",
        ),
        (
            {
                "trainer.v1.trainer_mode": "separate_async",
                STEPS: 2,
                "trainer.n_gpus_per_node": 7,
                "actor_rollout_ref.rollout.nnodes": 1,
                "actor_rollout_ref.rollout.n_gpus_per_node": 2,
                TENSOR_PARALLEL: 2,
            },
            "an engine takes 2 GPUs, and trainer.nnodes=1 × trainer.n_gpus_per_node=7 gives 7, which is no multiple",
        ),
        (
            {"trainer.v1.trainer_mode": "separate_async", STEPS: 4},
            "separate_async needs the product of the last two, 128, as train_batch_size",
        ),
        (
            {"trainer.v1.trainer_mode": "colocate_async", "+trainer.v1.colocate_async.parameter_sync_step": 2},
            "trainer.v1.colocate_async.parameter_sync_step=2: only the trainer separate_async makes several updates",
        ),
    ],
)
def test_what_verl_cannot_divide_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(**changes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.train_batch_size": 24},
        {"data.train_batch_size": 24, f"{ACTOR}.use_dynamic_bsz": True},
        {"data.train_batch_size": 65},
        {"data.train_batch_size": 65, f"{ACTOR}.use_dynamic_bsz": True},
        {"data.train_batch_size": 66},
        {"critic.ppo_mini_batch_size": 128},
        {"critic.ppo_mini_batch_size": 128, "algorithm.adv_estimator": "gae"},
        {f"{ACTOR}.ppo_micro_batch_size": 8},
        {f"{ACTOR}.ppo_micro_batch_size": 8, f"{ACTOR}.use_dynamic_bsz": True},
        {"actor_rollout_ref.rollout.log_prob_micro_batch_size": 8},
        {"actor_rollout_ref.ref.log_prob_micro_batch_size": 8},
        {"actor_rollout_ref.ref.log_prob_micro_batch_size": 8, f"{ACTOR}.use_kl_loss": True},
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": True},
    ],
    ids=str,
)
def test_the_start_takes_the_sizes_that_verls_own_check_takes(changes: dict[str, Any]) -> None:
    from hydra.errors import InstantiationException
    from verl.utils.config import validate_config

    model = {"critic.model.path": ROOT / "recipes" / "quickstart" / "model"}
    micro = {f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu": 8 for part in ("rollout", "ref")}
    config = compose_config([f"{key}={value}" for key, value in {**RIGHT, **model, **micro, **changes}.items()])
    run = RunView(config)
    try:
        validate_config(config, run.has_reference, run.has_critic)
    except (AssertionError, ValueError, InstantiationException):
        with pytest.raises(ConfigError):
            check_batch_sizes(config)
    else:
        check_batch_sizes(config)
