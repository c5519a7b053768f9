"""Failures of users and environments are marked and change no sibling; the control finds those that are not marked."""

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("conversations", "seed", "control"), [(96, 1, 48), pytest.param(2000, 0, 240, marks=pytest.mark.long)]
)
async def test_failures_are_marked_leave_nothing_and_change_no_sibling(
    conversations: int, seed: int, control: int
) -> None:
    from tests.long.interactions.interaction_faults import measure

    result = await measure(conversations, seed, control)
    assert result["faults"] > 20
    assert result["marked"] > 10
    wanted = dict.fromkeys(
        ("unmarked", "sound_marked", "leaks", "over_budget", "groups_incomplete", "sibling_advantages_changed"), 0
    )
    assert {key: result[key] for key in wanted} == wanted
    assert result["advantages_compared"] > 10_000
    assert result["control_unmarked"] > 0
    assert result["control_advantages_changed"] > 0


async def test_the_suite_finds_an_interaction_that_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.interactions import interaction_faults
    from verl_multiturn.calls.calls import Calls

    async def nothing(self: Calls) -> None:
        pass

    monkeypatch.setattr(Calls, "_end", nothing)
    _, leaks = await interaction_faults.play(16, 1)
    assert leaks["starts without one close"] >= 8
