"""What the manager asks its workers of their clocks and tools; Ray is a stand-in."""

from types import SimpleNamespace
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Worker:
    """A worker whose answers are values, or errors that are raised."""

    def __init__(self, stem: Any, schemas: Any = None) -> None:
        self.asked = 0
        self.stem = stem
        self.clock = SimpleNamespace(remote=self._clock)
        self.schemas = SimpleNamespace(remote=lambda: schemas)

    def _clock(self) -> Any:
        self.asked += 1
        return self.stem if isinstance(self.stem, Exception) else (self.stem, 0.0)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    from verl_multiturn.verl_bridge.loops import manager as module

    def get(answer: Any, timeout: float) -> Any:
        assert timeout < 10
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module.ray, "get", get)
    made = object.__new__(module.MultiTurnManager)
    made._clocked = set()
    return made


def test_each_worker_s_clock_is_told_once(manager: Any) -> None:
    from ray.exceptions import GetTimeoutError, RayActorError

    here, busy, dead, early = Worker("a-1"), Worker(GetTimeoutError()), Worker(RayActorError()), Worker("")
    manager.agent_loop_workers = [here, busy, dead, early]
    (clock,) = manager.take_clocks()
    assert (clock["event"], clock["file"]) == ("clock", "a-1")
    assert clock["offset_s"] > 1e9  # the stand-in's time is 0
    assert (here.asked, busy.asked, dead.asked, early.asked) == (5, 1, 1, 5)
    # The dead one is replaced, the others answer now.
    busy.stem, early.stem = "a-2", "a-3"
    manager.agent_loop_workers[2] = Worker("a-4")
    assert [clock["file"] for clock in manager.take_clocks()] == ["a-2", "a-4", "a-3"]
    assert manager.take_clocks() == []
    assert here.asked == 5


def test_a_busy_worker_tells_later_what_it_dropped_and_is_never_ended(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.loops import manager as module

    answers = {"a": 3, "b": 4}
    come = {"a"}
    asked: list[str] = []

    class Dropping:
        def __init__(self, name: str) -> None:
            self.take_dropped = SimpleNamespace(remote=lambda: asked.append(name) or name)

    manager.agent_loop_workers, manager._asked_dropped = [Dropping("a"), Dropping("b")], {}
    # A stand-in without `kill`.
    ray = SimpleNamespace(
        wait=lambda refs, num_returns, timeout: ([ref for ref in refs if ref in come], []), get=answers.__getitem__
    )
    monkeypatch.setattr(module, "ray", ray)
    assert manager.take_dropped() == 3
    come.add("b")
    assert manager.take_dropped() == 7
    assert asked == ["a", "b", "a"]


def test_the_tools_schemas_are_those_of_the_first_worker_that_knows_them(manager: Any) -> None:
    from ray.exceptions import RayActorError

    manager.agent_loop_workers = [Worker("a", RayActorError()), Worker("b", None)]
    assert manager.schemas() is None
    manager.agent_loop_workers.append(Worker("c", []))
    assert manager.schemas() == []


def test_what_a_worker_says_of_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import EchoTool
    from verl_multiturn.verl_bridge.loops import agent_loop

    monkeypatch.setattr(agent_loop, "_runners", {})
    assert agent_loop.tool_schemas() is None
    monkeypatch.setattr(agent_loop, "_runners", {"client": SimpleNamespace(tools={"echo": EchoTool()})})
    (schema,) = agent_loop.tool_schemas()
    assert schema["function"]["name"] == "echo"
