"""An agent-loop worker of a real Ray dies: its unfinished groups, and no others, are begun again by a new one."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    pytest.mark.stack,
    pytest.mark.deaths,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]


class Worker:
    """A worker that keeps the groups that it is given, ends them on request, and dies of groups with such a name."""

    def __init__(self, *_: Any) -> None:
        self.given: list[str] = []
        self.ended: list[tuple[str, float]] = []
        self.changed = asyncio.Event()

    async def generate_sequences(self, prompts: Any) -> None:
        if any("slow" in uid for uid in prompts["uid"]):
            await asyncio.sleep(0.5)
        self.given += list(prompts["uid"])
        self.changed.set()
        if any("deadly" in uid for uid in prompts["uid"]):
            os.kill(os.getpid(), signal.SIGKILL)

    async def finished(self, seen: int) -> list[tuple[str, float]]:
        while len(self.ended) <= seen:
            if any("unreachable" in uid for uid in self.given):
                from ray.exceptions import ActorUnavailableError

                raise ActorUnavailableError("the network is down", None)
            self.changed.clear()
            await self.changed.wait()
        return self.ended[seen:]

    async def end(self, uid: str) -> None:
        from verl_multiturn.verl_bridge.workers.group_end import GroupEnd

        self.ended.append((uid, GroupEnd(5.0, 6.0)))
        self.changed.set()

    async def groups(self) -> list[str]:
        return self.given

    async def cancel(self, uids: list[str]) -> int:
        return len(set(uids) & set(self.given))

    async def pid(self) -> int:
        return os.getpid()


class Stillborn:
    """A worker that dies at its start."""

    def __init__(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def finished(self, seen: int) -> list[tuple[str, float]]:
        return []

    async def generate_sequences(self, prompts: Any) -> None:
        return


class Queue:
    """The tags of TransferQueue, of one partition."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.cleared: list[str] = []
        self.partition = "train"

    def list_prompts(self, partition: str) -> dict[str, dict[str, Any]]:
        assert partition == self.partition
        return self.tags

    def clear_groups(self, uids: Any, partition: str, *, prompts: bool) -> None:
        assert not prompts
        self.cleared += uids

    def put_tags(self, uids: list[str], partition: str, tags: list[dict[str, Any]]) -> None:
        for uid, tag in zip(uids, tags, strict=True):
            self.tags[uid] |= tag


@pytest.fixture
def started(cluster: None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Queue]:
    import ray
    from verl.experimental.agent_loop import AgentLoopManager

    from verl_multiturn.verl_bridge.workers import manager as module

    queue = Queue()
    for name in ("list_prompts", "clear_groups", "put_tags"):
        monkeypatch.setattr(module, name, getattr(queue, name))
    monkeypatch.setattr(AgentLoopManager, "__init__", lambda self: None)
    manager: Any = module.MultiTurnManager()
    manager.config = manager.llm_client = manager.teacher_client = manager.reward_loop_worker_handles = None
    manager.agent_loop_workers_class = ray.remote(num_cpus=0)(Worker)
    manager.agent_loop_workers = [manager.agent_loop_workers_class.remote() for _ in range(2)]
    return manager, queue


def submit(manager: Any, queue: Queue, *uids: str) -> None:
    import torch
    from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict

    queue.tags |= {uid: {"status": "running"} for uid in uids}
    prompts = get_tensordict({"uid": list(uids)})
    prompts["dummy"] = torch.nested.as_nested_tensor([torch.tensor([7])] * len(uids), layout=torch.jagged)  # as loaded
    if queue.partition == "val":
        assign_non_tensor_data(prompts, "validate", True)
    manager.generate_sequences(prompts)


def groups(worker: Any) -> list[str]:
    import ray

    return list(ray.get(worker.groups.remote()))


def until(manager: Any, happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 500
    while not happened():
        assert time.monotonic() < end
        manager.wait(0.2)


def test_the_groups_of_a_dead_worker_are_begun_again(started: tuple[Any, Queue]) -> None:
    import ray

    manager, queue = started
    submit(manager, queue, "a", "b", "c", "d")
    first, second = manager.agent_loop_workers
    until(manager, lambda: (groups(first), groups(second)) == (["a", "b"], ["c", "d"]))
    ray.get(second.end.remote("d"))
    until(manager, lambda: manager.end_of(["d"]) == (5.0, 6.0, 0, "", ""))  # the worker gets a request for it
    assert manager.end_of(["d", "c"]) is None
    queue.tags["b"]["status"] = "finished"  # it ended just before its worker died
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    until(manager, lambda: groups(manager.agent_loop_workers[0]) == ["a"])  # Ray may run a later call first
    assert groups(second) == ["c", "d"]
    assert (queue.cleared, queue.tags["a"]["status"], queue.tags["b"]["status"]) == (["a"], "pending", "finished")
    ray.get(manager.agent_loop_workers[0].end.remote("a"))
    until(manager, lambda: "a" in manager._ends)
    assert sorted(manager._groups) == ["c"]


def test_a_group_that_kills_its_workers_fails(started: tuple[Any, Queue]) -> None:
    manager, queue = started
    submit(manager, queue, "deadly", "b")
    until(manager, lambda: queue.tags["deadly"]["status"] == "failure")
    assert queue.cleared == ["deadly"] * 4  # it was begun again three times
    assert sorted(manager._groups) == ["b"]


def test_a_dead_worker_has_nothing_to_cancel(started: tuple[Any, Queue]) -> None:
    import ray

    manager, queue = started
    submit(manager, queue, "a", "b")
    first, _ = manager.agent_loop_workers
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    assert manager.cancel(["a", "b"]) == 1
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    assert groups(manager.agent_loop_workers[0]) == []


def test_a_worker_that_dies_in_a_validation_is_replaced(started: tuple[Any, Queue]) -> None:
    import ray

    manager, queue = started
    queue.partition = "val"
    submit(manager, queue, "a", "b")
    first, _ = manager.agent_loop_workers
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    until(manager, lambda: groups(manager.agent_loop_workers[0]) == ["a"])
    assert "validate" in manager._groups["a"].prompt


def test_a_worker_that_cannot_be_reached_is_ended_and_replaced(started: tuple[Any, Queue]) -> None:
    import ray
    from ray.exceptions import RayActorError

    manager, queue = started
    submit(manager, queue, "unreachable", "b")
    first, _ = manager.agent_loop_workers
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    with pytest.raises(RayActorError):
        ray.get(first.groups.remote())
    assert queue.cleared[0] == "unreachable"


def test_a_group_is_not_cancelled_before_its_new_worker_has_it(started: tuple[Any, Queue]) -> None:
    import ray

    manager, queue = started
    submit(manager, queue, "slow", "b")
    first, _ = manager.agent_loop_workers
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    ray.get(manager.agent_loop_workers[0].pid.remote())  # it has started
    assert manager.cancel(["slow"]) == 1


def test_groups_that_nobody_waits_for_are_forgotten(
    started: tuple[Any, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay buffer of the user's own asks neither for groups nor for their ends."""
    import ray

    from verl_multiturn.verl_bridge.workers import manager as module

    manager, queue = started
    monkeypatch.setattr(module, "_ENDS", 2)
    for number in range(4):
        submit(manager, queue, f"a{number}")
        ray.get(manager.agent_loop_workers[0].end.remote(f"a{number}"))
        ray.wait(list(manager._polls.values()), num_returns=1, timeout=60)
    submit(manager, queue, "b")
    assert sorted(manager._groups) == ["b"]
    assert list(manager._ends) == ["a2", "a3"]


def test_a_run_ends_when_a_worker_cannot_be_replaced(
    started: tuple[Any, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl_multiturn.verl_bridge.workers import manager as module

    manager, queue = started
    submit(manager, queue, "a", "b")
    monkeypatch.setattr(module, "_STARTS", 2)
    manager.agent_loop_workers_class = ray.remote(num_cpus=0)(Stillborn)
    os.kill(ray.get(manager.agent_loop_workers[0].pid.remote()), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker 0 has died and cannot be replaced: 2 processes in a row died"):
        until(manager, lambda: False)


def test_a_run_ends_when_a_replacement_does_not_start(
    started: tuple[Any, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl_multiturn.verl_bridge.workers import manager as module

    manager, queue = started
    submit(manager, queue, "a", "b")
    manager.agent_loop_workers_class = ray.remote(num_cpus=0, resources={"none": 1})(Worker)
    os.kill(ray.get(manager.agent_loop_workers[0].pid.remote()), signal.SIGKILL)
    monkeypatch.setattr(module, "_START_S", 0.5)
    with pytest.raises(RuntimeError, match=r"cannot be replaced: no process has started for 0\.5 s"):
        until(manager, lambda: False)


def test_a_replacement_that_has_started_may_die_later(started: tuple[Any, Queue]) -> None:
    import ray

    manager, queue = started
    submit(manager, queue, "a", "b")
    for _ in range(4):
        first = manager.agent_loop_workers[0]
        os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
        until(manager, lambda before=first: manager.agent_loop_workers[0] is not before)
    assert queue.tags["a"]["status"] == "failure"


def test_a_worker_that_hangs_does_not_hold_up_a_cancellation(
    started: tuple[Any, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl_multiturn.verl_bridge.workers import manager as module

    manager, queue = started
    submit(manager, queue, "a", "b")
    first, second = manager.agent_loop_workers
    until(manager, lambda: (groups(first), groups(second)) == (["a"], ["b"]))
    os.kill(ray.get(first.pid.remote()), signal.SIGSTOP)
    wait = ray.wait

    def wait_for_the_other(asked: Any, *, num_returns: int = 1, timeout: float | None = None) -> Any:
        if timeout == module.HUNG_S:  # it would end the other one, too, which a busy machine makes late
            wait(asked, num_returns=1, timeout=500)
            timeout = 0
        return wait(asked, num_returns=num_returns, timeout=timeout)

    monkeypatch.setattr(ray, "wait", wait_for_the_other)
    assert manager.cancel(["b"]) == 1
    until(manager, lambda: manager.agent_loop_workers[0] is not first)
    until(manager, lambda: groups(manager.agent_loop_workers[0]) == ["a"])
