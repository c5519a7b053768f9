"""Tools that go out to other programs come back unchanged, and no session is another's; and the suite finds errors."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.long.tools import tools_out
from tests.long.tools.out_schemas import random_schema
from tests.long.tools.out_server import serve
from verl_multiturn import ToolSchema
from verl_multiturn.tool_servers.sessions import ToolHost

RIGHT = {"mixed": 0, "not_released": 0, "released_twice": 0}


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_many_schemas_come_back_and_many_sessions_are_apart() -> None:
    found = await tools_out.measure(5000, 64, seed=0, with_program=False)
    assert (found["mcp_schemas"], found["mcp_changed"], found["a2a_changed"] or 0) == (5000, 0, 0)
    assert {key: found[key] for key in RIGHT} == RIGHT
    assert found["released_once"] == found["sessions"] >= 64
    assert (found["killed"], found["clients"]["sdk_stdio"], found["clients"]["sdk_http"]) == (12, True, True)


async def test_schemas_come_back_over_stdio() -> None:
    assert await tools_out.round_trip(150, seed=3) == {"mcp_schemas": 150, "mcp_changed": 0}


def test_the_random_schemas_are_those_that_a_loader_accepts_and_differ() -> None:
    draw = random.Random(5)
    schemas = [random_schema(draw, f"tool_{number}") for number in range(200)]
    assert [ToolSchema.read(each, "it").as_dict() for each in schemas] == schemas
    assert len({str(each["function"].get("parameters")) for each in schemas}) > 150


@pytest.mark.parametrize("is_broken", [False, True])
async def test_sessions_at_once_are_apart_and_the_suite_finds_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool, tmp_path: Path
) -> None:
    call = ToolHost.call

    async def mixes(self: ToolHost, key: str, name: str, arguments: dict[str, int]) -> object:
        return await call(self, "one for all", name, arguments)

    if is_broken:
        monkeypatch.setattr(ToolHost, "call", mixes)
    async with serve(tmp_path) as served:
        count = 4 if is_broken else 24
        mixed = await asyncio.gather(*(tools_out.play(served.address, n, random.Random(n)) for n in range(count)))
    assert (sum(mixed) > 0) is is_broken
    assert served.count("create") == served.count("release") == (1 if is_broken else 24)


def test_the_suite_finds_schemas_that_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client has them that reads the protocol's own fields alone."""
    from verl_multiturn.tools import mcp_tools

    monkeypatch.setattr(mcp_tools, "SCHEMA_META", "elsewhere")
    assert asyncio.run(tools_out.round_trip(40, seed=3))["mcp_changed"] > 10
