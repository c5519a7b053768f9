"""The supervisor where the worker is spared: whom it kills at a limit, and when it gives up."""

import signal
from typing import Any

import pytest

from verl_multiturn.sandbox.guest import supervisor
from verl_multiturn.sandbox.guest.supervisor import _MOST_WAITS, _SPARED, _Supervisor
from verl_multiturn.sandbox.guest.usage import Usage


class EndedError(Exception):
    pass


class Looks:
    """Looks of a supervisor that finds the limit of memory exceeded; the worker is process 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, int]] = []
        self._supervisor = object.__new__(_Supervisor)
        vars(self._supervisor).update(
            _spec={"spares_worker": True}, _worker=2, _times_over=0, _waits=0, _killed=set[str]()
        )
        monkeypatch.setattr(supervisor.os, "kill", lambda *given: self.sent.append(given))
        monkeypatch.setattr(self._supervisor, "_end", self._end)

    def _end(self, reason: str) -> None:
        raise EndedError(reason)

    def look(self, **states: bytes) -> list[int]:
        """Look once, at processes with their states by `p` and their id; return those that are killed then."""
        usage = object.__new__(Usage)
        usage.states = {"2": b"R", **{name[1:]: state for name, state in states.items()}}
        self.sent.clear()
        self._supervisor._on_exceeded("memory", usage)
        return sorted(process for process, number in self.sent if number == signal.SIGKILL)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def test_looks_at_processes_that_are_still_ending_do_not_end_the_sandbox(looks: Looks) -> None:
    assert looks.look(p3=b"R") == [3]
    for number in range(1, 10 * _SPARED):
        assert looks.look(p3=b"D", p4=b"R") == ([3, 4] if number % _SPARED == 0 else [])
    for _ in range(10 * _SPARED, _MOST_WAITS):
        looks.look(p3=b"D")
    with pytest.raises(EndedError, match="memory"):
        looks.look(p3=b"D")


def test_no_process_sees_another_one_killed(looks: Looks) -> None:
    assert looks.look(p3=b"S", p4=b"R", p5=b"Z") == [3, 4, 5]
    assert [number for _, number in looks.sent] == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3
    assert {process for process, _ in looks.sent[:3]} == {3, 4, 5}


@pytest.mark.parametrize("left", [{}, {"p3": b"Z"}])
def test_a_limit_that_is_exceeded_when_the_killed_are_gone_ends_the_sandbox(looks: Looks, left: dict[str, Any]) -> None:
    assert looks.look(p3=b"R") == [3]
    for _ in range(_SPARED - 1):
        looks.look(**left)
    with pytest.raises(EndedError, match="memory"):
        looks.look(**left)
