"""Our agent-loop worker: who waits for groups is woken, and a cancelled group leaves nothing behind."""

import asyncio
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker of ours whose conversations the test ends; `puts` has what goes to TransferQueue."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import agent_loop_tq

    from verl_multiturn.verl_bridge.loops.manager import MultiTurnWorker

    class Worker(MultiTurnWorker):
        def __init__(self) -> None:
            self._groups, self._conversation_ends, self._row_ends, self._ended, self._forgotten = {}, {}, {}, [], 0
            self._changed = asyncio.Event()
            self._oversampled, self._writing, self._raised, self._rerolled_from = {}, set(), {}, {}
            self.processor = None
            self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 2}}})
            self.puts: list[tuple[str, str]] = []
            self.let_go = asyncio.Event()
            self.writing = asyncio.Event()
            self.released = 0

        async def _run_agent_loop(self, *args: Any, uid: str, session_id: int, **kwargs: Any) -> None:
            try:
                await self.let_go.wait()
            finally:
                await asyncio.sleep(0.01)  # tools are released
                self.released += 1
            await self._agent_loop_postprocess([], uid=uid, session_id=session_id)

    async def write(self: Any, output: Any, uid: str, session_id: int) -> None:
        await self._compute_score([], kwargs={})
        await self._compute_teacher_logprobs()
        self.writing.set()
        await asyncio.sleep(0.01)
        self.puts.append((f"{uid}_{session_id}", "row"))

    made = Worker()

    async def put(key: str, tag: dict[str, Any], **_: Any) -> None:
        made.puts.append((key, tag["status"]))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    for name, method in (
        ("_agent_loop_postprocess", write),
        ("_compute_score", nothing),
        ("_compute_teacher_logprobs", nothing),
    ):
        monkeypatch.setattr(MultiTurnWorker.__mro__[1], name, method)
    return made


def start(worker: Any, uid: str) -> asyncio.Task[None]:
    return asyncio.ensure_future(worker._run_prompt({"uid": uid}, {}, {"validate": False}))


async def test_who_waits_is_woken_by_a_group_that_ends(worker: Any) -> None:
    begun = time.time()
    group = start(worker, "a")
    waiting = asyncio.ensure_future(worker.finished(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    worker.let_go.set()
    ((uid, ended),) = await waiting
    assert (uid, worker.puts[-1]) == ("a", ("a", "finished"))
    assert begun < ended.conversation < time.time() - 0.01  # before its row was written
    assert ended.conversation + 0.01 < ended.rows <= time.time()
    await group
    assert await worker.finished(0) == [("a", ended)]
    await start(worker, "b")
    assert [uid for uid, _ in await worker.finished(1)] == ["b"]
    assert (worker._conversation_ends, worker._row_ends) == ({}, {})


async def test_a_group_tells_how_many_of_its_conversations_raised(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.loops.manager import MultiTurnWorker

    async def run(*_: Any, session_id: int, **__: Any) -> None:
        if session_id == 1:
            raise TypeError("a mistake of an author")

    monkeypatch.delattr(type(worker), "_run_agent_loop")
    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_run_agent_loop", run)
    await start(worker, "a")
    ((_, ended),) = await worker.finished(0)
    assert (ended.raised, worker.puts[-1], worker._raised) == (1, ("a", "failure"), {})


async def test_a_mistake_of_the_reward_function_is_told_at_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.errors import RewardContractError
    from verl_multiturn.verl_bridge.loops.manager import MultiTurnManager, MultiTurnWorker
    from verl_multiturn.verl_bridge.trainer.replay_buffer import End

    async def run(*_: Any, session_id: int, **__: Any) -> None:
        if session_id == 1:
            raise RewardContractError("it returned None")
        await worker.let_go.wait()

    monkeypatch.delattr(type(worker), "_run_agent_loop")
    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_run_agent_loop", run)
    group = start(worker, "a")
    told = await worker.finished(0)
    assert (told, group.done()) == ([("a", End(0.0, 0.0, mistake="it returned None"))], False)

    manager: Any = object.__new__(MultiTurnManager)
    manager.__dict__ |= {"_starts": {}, "_polls": {0: "poll"}, "_seen": {}, "_ends": {}, "_raised": 0, "_groups": {}}
    monkeypatch.setattr("ray.wait", lambda polls, **_: (polls, []))
    monkeypatch.setattr("ray.get", lambda _: told)
    manager._collect()
    assert manager.mistake == "it returned None"
    worker.let_go.set()
    await group


async def test_the_rows_end_before_the_group_is_told(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may go on before the worker knows that its word has come."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    told: list[float] = []

    async def put(key: str, tag: dict[str, Any], **_: Any) -> None:
        told.append(time.time())
        await asyncio.sleep(0.02)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    worker.let_go.set()
    await start(worker, "a")
    ((_, ended),) = await worker.finished(0)
    assert ended.conversation < ended.rows <= told[-1]


async def test_a_cancelled_group_releases_and_writes_nothing(worker: Any) -> None:
    groups = [start(worker, "a"), start(worker, "b")]
    await asyncio.sleep(0.01)
    assert await worker.cancel(["a", "unknown"]) == 1
    assert (worker.released, worker.puts) == (2, [("a", "running"), ("b", "running")])
    worker.let_go.set()
    await asyncio.gather(*groups, return_exceptions=True)
    assert [key for key, _ in worker.puts[2:]] == ["b_0", "b_1", "b"]
    assert worker._groups == {}


async def test_a_row_that_is_being_written_is_written_before_a_cancellation_ends(worker: Any) -> None:
    start(worker, "a")
    worker.let_go.set()
    await worker.writing.wait()
    assert await worker.cancel(["a"]) == 1
    assert ("a_0", "row") in worker.puts
    written = list(worker.puts)
    await asyncio.sleep(0.05)
    assert worker.puts == written
    assert ("a", "finished") not in written


async def test_a_reward_that_does_not_come_holds_up_no_cancellation(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what TransferQueue is being given must be waited for, see above."""
    from verl_multiturn.verl_bridge.loops.manager import MultiTurnWorker

    scoring = asyncio.Event()

    async def never(*_: Any, **__: Any) -> None:
        scoring.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_compute_score", never)
    start(worker, "a")
    worker.let_go.set()
    await scoring.wait()
    async with asyncio.timeout(60):
        assert await worker.cancel(["a"]) == 1
    assert (worker.puts, worker._writing) == ([("a", "running")], set())


async def test_a_conversation_whose_reward_is_waited_for_takes_no_room_in_the_cache(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.rollout.cache.residents import resident, residing
    from verl_multiturn.verl_bridge.loops.manager import MultiTurnWorker

    over: list[bool] = []

    async def score(*_: Any, **__: Any) -> None:
        over.append(resident().is_over)  # type: ignore[union-attr]

    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_compute_score", score)
    with residing("a") as conversation:
        assert not conversation.is_over
        await worker._agent_loop_postprocess([], uid="a", session_id=0)
    assert over == [True]
