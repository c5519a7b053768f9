"""Weights that are swapped under the real command and a real SGLang: all tokens are scored anew."""

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.timeout(1800)
def test_each_token_is_that_of_the_weights_with_its_hash() -> None:
    from tests.long.endpoint.deploy_engine import KINDS, measure

    figures = measure(swaps=6, agents=4, seed=0)  # one model of each fault comes between them
    assert {kind: figures[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)
    assert figures["swaps"] == 6
    assert all(figures[name] > 0 for name in ("sessions", "tokens", "telling", "interrupted", "refused_tensor"))
