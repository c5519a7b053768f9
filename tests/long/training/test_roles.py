"""Zero-sum games of two roles: what each learns, under each filter; one role alone, and a role that is not trained."""

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def test_games_in_short() -> None:
    from tests.long.training.roles import ADVANTAGES, figures

    found = figures(short=True)
    assert (found["wrong"], found["faults"]) == (0, {})
    assert found["advantages"] == {player: list(own) for player, own in ADVANTAGES.items()}
    assert (found["left_out"], found["their_tokens"], found["untrained_completions"]) == (0, 0, 8)
    assert found["left_out_without_roles"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_games() -> None:
    from tests.long.training.roles import figures

    assert figures(short=False)["faults"] == {}
