"""Weights that are swapped under load: each token keeps its hash, and no session is lost."""

import pytest

pytestmark = pytest.mark.stack


@pytest.mark.timeout(600)
@pytest.mark.parametrize("swaps", [5, pytest.param(20, marks=pytest.mark.long)], ids=["short", "whole"])
def test_each_token_keeps_the_hash_of_its_weights(swaps: int) -> None:
    from tests.long.endpoint.deploy_load import KINDS, measure

    figures = measure(swaps, agents=4, seed=0)
    assert {kind: figures[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)
    assert figures["swaps"] == swaps
    assert figures["sessions"] > 0
    assert figures["tokens"] > 0


@pytest.mark.timeout(600)
def test_the_counter_sees_a_wrong_hash() -> None:
    from tests.long.endpoint.deploy_load import control

    assert control(4, agents=4, seed=0)["wrong_hash"] > 0
