"""Hostile requests and ends of agents have their expected outcomes; and the figures see one that has not."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from tests.long.endpoint.endpoint_attacks import DOORS, is_right, measure, send
from tests.long.endpoint.endpoint_ends import ENDS
from tests.long.endpoint.endpoint_requests import REQUESTS, Target
from tests.long.endpoint.gateway_programs import AT_GATEWAY
from tests.long.endpoint.gateway_requests import ASKED, ENDED, FRESH
from tests.proxy_clients import FakeSession, serving

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _agents_that_fail_on_purpose() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_the_tables_are_as_long_as_promised_and_name_each_attack_once() -> None:
    assert (len(REQUESTS) >= 69, len(ENDS) >= 40) == (True, True)
    assert {each.name for each in ENDS} == AT_GATEWAY.keys()
    for table in (REQUESTS, ENDS, [*FRESH, *ASKED, *ENDED]):
        names = [each.name for each in table]
        assert len(set(names)) == len(names)


@pytest.mark.timeout(1800)
# The end "leaves a request open" leaves its socket to the collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("door", DOORS)
def test_each_door_holds(door: str) -> None:
    found = measure([door])
    assert is_right(found), found


def test_another_status_and_a_server_error_are_counted() -> None:
    good = next(each for each in REQUESTS if each.name == "a good request")
    figures = dict.fromkeys(("requests", "unexpected", "server_errors"), 0)

    async def attack() -> None:
        async with serving(FakeSession()) as (_, access):
            target = Target(int(access.anthropic_base_url.rpartition(":")[2]), access.api_key)
            await send([good, replace(good, statuses=(401,))], target, figures, Console(quiet=True))

    asyncio.run(attack())
    assert figures == {"requests": 2, "unexpected": 1, "server_errors": 0}
