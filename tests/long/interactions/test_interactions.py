"""Hostile texts, old classes and worlds of interactions keep their promises; their speed is not tested."""

from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def test_hostile_texts_bring_no_control_token_in() -> None:
    from tests.long.interactions.interaction_texts import hostile_texts

    found = hostile_texts(8, ["quickstart", "gemma3"])
    assert (found.families, found.texts, found.refused) == (1, 8, ["gemma3"])
    assert found.conversations + found.calls == 3 * 8
    assert found.forged == []


def test_without_the_firewall_they_are_noticed() -> None:
    from tests.long.interactions.interaction_texts import hostile_texts

    assert hostile_texts(10, ["quickstart"], guarded=False).forged


def test_all_figures_are_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.interactions import interaction_old_classes, interactions

    def known(wheel: Any) -> dict[str, Any]:
        return {"old_classes": 2, "old_same": True}

    monkeypatch.setattr(interaction_old_classes, "measure", known)  # it downloads
    figures = interactions.measure(None, 4, ["quickstart"])
    assert figures["control_tokens"] == 0
    assert figures["gigpo_error"] <= 1e-6
    assert figures["turn_gradient_error"] <= 0.01 < 0.5 < figures["control_gradient_error"]
    assert figures["same_world"]
    wanted = {"old_classes", "old_same", "hostile_texts", "reply_p50_ms", "env_step_p50_ms", "user_turn_p50_ms"}
    assert wanted <= set(figures)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_families_all_worlds_and_verls_own_old_classes() -> None:
    """Download a wheel of verl that is 1 MB large."""
    from tests.long.interactions import interaction_envs, interactions

    figures = interactions.measure()
    assert figures["old_same"]
    assert figures["control_tokens"] == 0
    assert figures["gigpo_error"] <= 1e-6
    assert figures["turn_gradient_error"] <= 0.01 < 0.5 < figures["control_gradient_error"]
    assert figures["same_world"]
    assert interaction_envs.worlds_in_threads() > 1  # the control
