"""A gateway holds: hostile requests, an engine that is away, a full disk, many sessions, kills; faults are seen."""

from typing import Any

import pytest

pytestmark = pytest.mark.stack

LONG = pytest.mark.long


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("part", "sizes"),
    [
        ("attack", {"requests": 300}),
        ("away", {}),
        ("full", {}),
        ("crowd", {"sessions": 50}),
        ("idle", {"sessions": 20}),
        ("kills", {"kills": 3}),
        pytest.param("attack", {"requests": 10_000}, marks=LONG),
        pytest.param("crowd", {"sessions": 1000}, marks=LONG),
        pytest.param("idle", {"sessions": 1000}, marks=LONG),
        pytest.param("kills", {"kills": 30}, marks=LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "whole",
)
def test_each_part_holds(part: str, sizes: dict[str, Any]) -> None:
    from tests.long.endpoint.gateway_load import faults_in, measure

    problems: list[str] = []
    found = measure([part], **sizes, report=problems.append)
    assert faults_in(found) == 0, (found, problems)
    figures = found[part]
    done = [
        name
        for name in ("requests", "away_requests", "full_requests", "sessions", "idle_sessions", "ends")
        if name in figures
    ]
    assert done
    assert all(figures[name] > 0 for name in done)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["any_key", "other_status", "counted_again", "unsynced", "early", "two_ends"])
def test_the_figures_see_each_fault(fault: str) -> None:
    from tests.long.endpoint.gateway_load import CONTROLS, control

    assert fault in {name for name, _, _ in CONTROLS}
    assert control(only=[fault])[fault] > 0
