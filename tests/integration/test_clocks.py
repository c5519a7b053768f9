"""The manager's requests to its workers, once a step; Ray is a stand-in."""

from types import SimpleNamespace
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Worker:
    """A worker whose answers to `news` are values, None while it is busy, or errors that are raised."""

    def __init__(self, *said: Any) -> None:
        self.said, self.asked = list(said), 0
        self.news = SimpleNamespace(remote=self._news)

    def _news(self) -> Any:
        self.asked += 1
        return Answer(self)


class Answer:
    """Ray's reference to an answer."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def has_come(self) -> bool:
        return self.worker.said[0] is not None

    def get(self) -> Any:
        said = self.worker.said.pop(0) if len(self.worker.said) > 1 else self.worker.said[0]
        if isinstance(said, Exception):
            raise said
        return said


class Ray:
    """Ray with a clock, in which each answer takes the time in `delays`."""

    def __init__(self) -> None:
        self.now, self.delays = 1000.0, [0.5]
        self.killed: list[Worker] = []
        self.waited: list[float] = []

    def time(self) -> float:
        return self.now

    def wait(self, refs: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        assert num_returns == 1
        come = [ref for ref in refs if ref.has_come][:1]
        if come:
            self.now += self.delays.pop(0) if len(self.delays) > 1 else self.delays[0]
        else:
            self.waited.append(timeout)
        return come, []

    def get(self, ref: Answer) -> Any:
        return ref.get()

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    from verl_multiturn.verl_bridge.workers import news as module

    made = Ray()
    monkeypatch.setattr(module, "ray", made)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=made.time, monotonic=lambda: 0.0))
    return made


def news(cut: int = 0, dropped: int = 0, stem: str = "", schemas: Any = None) -> Any:
    from verl_multiturn.verl_bridge.workers.news import News

    return News(cut, cut / 2, dropped, stem, 0.0, schemas)


def test_what_the_workers_of_a_step_count_is_summed(ray: Ray) -> None:
    from ray.exceptions import RayActorError

    from verl_multiturn.verl_bridge.workers.news import NewsRounds, RunNews

    workers = [Worker(news(1, 2, schemas=None)), Worker(RayActorError()), Worker(news(3, 4, schemas=["a"]))]
    assert NewsRounds().take(workers, of_all=False) == RunNews(4, 2.0, 6, [], ["a"])
    assert [worker.asked for worker in workers] == [1, 1, 1]  # without records there is no clock to know


def test_each_workers_clock_is_known_once_by_its_quickest_answer(ray: Ray) -> None:
    from verl_multiturn.verl_bridge.workers.news import NewsRounds

    rounds, here = NewsRounds(), Worker(news(1, stem="a-1"))
    ray.delays = [0.5, 0.25, 1.0, 0.5, 0.5]
    found = rounds.take([here], of_all=False)
    assert found.clocks == [{"event": "clock", "file": "a-1", "offset_s": 1000.625, "error_s": 0.125}]
    assert (here.asked, found.cut) == (5, 5)
    new = Worker(news(stem="a-2"))
    found = rounds.take([here, new], of_all=False)
    assert ([clock["file"] for clock in found.clocks], here.asked, new.asked) == (["a-2"], 10, 5)
    assert (rounds.take([here, new], of_all=False).clocks, here.asked) == ([], 11)


def test_a_busy_worker_is_waited_for_once_says_it_later_and_is_never_ended(ray: Ray) -> None:
    from verl_multiturn.verl_bridge.workers.news import NewsRounds

    rounds, here, busy = NewsRounds(), Worker(news(0, 3, "a")), Worker(None)
    found = rounds.take([here, busy], of_all=False)
    assert (found.dropped, [clock["file"] for clock in found.clocks], ray.waited) == (3, ["a"], [2.0])
    ray.now += 60.0
    busy.said = [news(0, 4, "b")]
    found = rounds.take([here, busy], of_all=False)
    # Its answer is a minute old, and not usable for its clock.
    assert (found.dropped, found.clocks, busy.asked) == (7, [], 1)
    assert [clock["file"] for clock in rounds.take([here, busy], of_all=False).clocks] == ["b"]
    assert ray.killed == []


def test_one_that_hangs_is_ended_where_all_have_to_answer(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    from verl_multiturn.verl_bridge.workers.news import NewsRounds

    rounds, here, hung = NewsRounds(), Worker(news(2)), Worker(None)
    assert rounds.take([here, hung], of_all=True).cut == 2
    assert (ray.killed, ray.waited) == ([hung], [300.0])
    assert "an agent-loop worker has not answered 'news' for 300 s and is ended" in caplog.text


def test_a_worker_whose_answer_fails_ends_no_step_and_is_named_once(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    from ray.exceptions import RayTaskError

    from verl_multiturn.verl_bridge.workers.news import NewsRounds, RunNews

    error = RayTaskError("news", "a traceback", ValueError("its disk is full")).as_instanceof_cause()
    rounds, workers = NewsRounds(), [Worker(error, error, news(5)), Worker(news(2, 3))]
    assert [rounds.take(workers, of_all=True) for _ in range(3)] == [*[RunNews(2, 1.0, 3)] * 2, RunNews(7, 3.5, 3)]
    assert ray.killed == []
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("metrics lack what an agent-loop worker could not report: ")
    assert "its disk is full" in line


def test_what_a_worker_says_of_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import EchoTool
    from verl_multiturn.verl_bridge.loops import agent_loop

    monkeypatch.setattr(agent_loop, "_runners", {})
    assert agent_loop.tool_schemas() is None
    monkeypatch.setattr(agent_loop, "_runners", {"client": SimpleNamespace(tools={"echo": EchoTool()})})
    (schema,) = agent_loop.tool_schemas()
    assert schema["function"]["name"] == "echo"
