"""Masks and columns as literal lists."""

import pytest

from verl_multiturn import Source, StopReason, Trajectory, TrajectoryError


def two_turns() -> Trajectory:
    trajectory = Trajectory()
    trajectory.append_prompt([1, 2, 3])
    trajectory.append_sampled([10, 11], [-0.1, -0.2], [7, 7])
    trajectory.append_context([4], Source.TEMPLATE)
    trajectory.append_context([5, 6], Source.OBSERVATION)
    trajectory.append_sampled([12], [-0.3], [8])
    return trajectory


def test_columns_of_two_turns() -> None:
    trajectory = two_turns()
    assert trajectory.ids == [1, 2, 3, 10, 11, 4, 5, 6, 12]
    assert trajectory.mask == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, 0.0, -0.1, -0.2, 0.0, 0.0, 0.0, -0.3]
    assert trajectory.versions == [-1, -1, -1, 7, 7, -1, -1, -1, 8]
    assert trajectory.turn_ids == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert trajectory.sources == [0, 0, 0, 1, 1, 2, 3, 3, 1]
    assert (trajectory.prompt_length, trajectory.response_length, trajectory.turns) == (3, 6, 2)


def test_lengths_must_match_and_nothing_is_written_when_they_do_not() -> None:
    trajectory = two_turns()
    with pytest.raises(TrajectoryError, match="2 ids, 1 logprobs, 2 versions"):
        trajectory.append_sampled([1, 2], [-0.1], [0, 0])
    assert len(trajectory) == 9
    assert len(trajectory.logprobs) == 9


@pytest.mark.parametrize("logprob", [0.5, float("nan"), float("-inf")])
def test_a_logprob_is_a_finite_log_probability(logprob: float) -> None:
    trajectory = two_turns()
    with pytest.raises(TrajectoryError, match="no log-probability"):
        trajectory.append_sampled([1], [logprob], [0])


def test_order() -> None:
    trajectory = Trajectory()
    with pytest.raises(TrajectoryError, match="need a prompt"):
        trajectory.append_sampled([1], [-0.1], [0])
    with pytest.raises(TrajectoryError, match="no token"):
        trajectory.append_prompt([])
    trajectory.append_prompt([1])
    with pytest.raises(TrajectoryError, match="first and once"):
        trajectory.append_prompt([1])
    with pytest.raises(TrajectoryError, match="assistant turn before"):
        trajectory.append_context([1], Source.OBSERVATION)


def test_a_turn_that_another_row_trains_is_context() -> None:
    trajectory = Trajectory()
    with pytest.raises(TrajectoryError, match="assistant turn before"):
        trajectory.append_context([1], Source.EARLIER)
    trajectory.append_prompt([1, 2])
    trajectory.append_context([10, 11], Source.EARLIER)
    trajectory.append_context([4], Source.OBSERVATION)
    trajectory.append_sampled([12], [-0.3], [8])
    assert trajectory.mask == [0, 0, 0, 0, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, 0.0, 0.0, 0.0, -0.3]
    assert trajectory.versions == [-1, -1, -1, -1, -1, 8]
    assert trajectory.turn_ids == [0, 0, 0, 0, 0, 0]
    assert trajectory.sources == [0, 0, 5, 5, 3, 1]
    assert (trajectory.prompt_length, trajectory.turns) == (2, 1)


def test_context_is_never_sampled() -> None:
    with pytest.raises(TrajectoryError, match="context tokens"):
        two_turns().append_context([1], Source.SAMPLED)


def test_sealed_is_sealed() -> None:
    trajectory = two_turns()
    trajectory.seal(StopReason.FINISHED)
    with pytest.raises(TrajectoryError, match="sealed"):
        trajectory.append_sampled([1], [-0.1], [0])
    with pytest.raises(TrajectoryError, match="already sealed"):
        trajectory.seal(StopReason.FINISHED)
