"""The configuration that the tests build from a copy is the one that Hydra composes."""

import pytest
from omegaconf import OmegaConf

from tests.integration.test_refusals import RIGHT
from tests.trainer_config import compose_config, compose_in_full

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{key}={value}" for key, value in RIGHT.items()],
        ["+actor_rollout_ref.rollout.custom.multiturn.near_rewards=all", "++data.train_files=[a.parquet,b.parquet]"],
        ["model_engine=torchtitan", "actor_rollout_ref.actor.clip_ratio=0.3"],
        ["++critic.optim.lr=5", "~critic.optim.lr"],
        ["critic.optim.lr=5", "~critic.optim.lr", "hydra.run.dir=x"],
    ],
)
def test_a_copy_with_overrides_is_what_hydra_composes(overrides: list[str]) -> None:
    quick = compose_config(overrides)
    whole = compose_in_full(["actor_rollout_ref.rollout.tensor_model_parallel_size=1", *overrides])
    assert OmegaConf.to_container(quick) == OmegaConf.to_container(whole)
    assert list(quick) == list(whole)
    assert OmegaConf.is_struct(quick) is OmegaConf.is_struct(whole) is True


@pytest.mark.parametrize("override", ["data.no_such_key=1", "+data.train_batch_size=1", "data.train_batch_size=[1"])
def test_an_override_that_hydra_refuses_is_refused(override: str) -> None:
    with pytest.raises(Exception) as quick:  # noqa: PT011 - whatever Hydra raises
        compose_config([override])
    with pytest.raises(type(quick.value)) as whole:
        compose_in_full([override])
    assert str(quick.value) == str(whole.value)
