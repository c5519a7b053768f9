"""Sessions of agents at random keep the proxy's promises; and the counters see faults."""

import logging
from collections.abc import Iterator

import pytest

from tests.support.families import names

pytestmark = pytest.mark.stack


@pytest.fixture(autouse=True)
def _an_engine_that_fails_on_purpose() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("families", "requests"),
    [(["quickstart"], 240), pytest.param(names(), 20_400, marks=pytest.mark.long)],
    ids=["short", "whole"],
)
def test_each_completion_is_trained_once_whatever_clients_send(families: list[str], requests: int) -> None:
    from tests.long.endpoint.proxy_fuzz import KINDS, family_of, measure

    figures = measure([family_of(name) for name in families], requests, seed=0, with_ends=len(families) > 1)
    assert {kind: figures[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)
    assert figures["requests"] >= requests


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_counters_see_each_fault() -> None:
    from tests.long.endpoint.proxy_fuzz import CONTROLLED, control, family_of

    figures = control(family_of("quickstart"), CONTROLLED, seed=0)
    assert figures["seen"] == figures["faults"] > 0
