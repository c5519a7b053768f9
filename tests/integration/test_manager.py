"""Our agent-loop worker: who waits for groups is woken, and a cancelled group leaves nothing behind."""

import asyncio
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker of ours whose conversations the test ends; `puts` has the data for TransferQueue."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import agent_loop_tq

    from verl_multiturn.rows.keys import RowKey
    from verl_multiturn.verl_bridge.compat import row_store
    from verl_multiturn.verl_bridge.workers.shared_puts import SharedPuts
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    class Worker(MultiTurnWorker):
        def __init__(self) -> None:
            self._groups, self._conversation_ends, self._row_ends, self._ended, self._forgotten = {}, {}, {}, [], 0
            self._changed = asyncio.Event()
            self._oversampled, self._siblings, self._raised, self._errors, self._rerolled_from = {}, {}, {}, {}, {}
            self._puts, self.tokenizer = SharedPuts(), None
            self.processor = None
            self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 2}}})
            self.puts: list[tuple[str, str]] = []
            self.let_go = asyncio.Event()
            self.writing = asyncio.Event()
            self.released = 0
            self.distillation_enabled = False

        async def _run_agent_loop(self, *args: Any, uid: str, session_id: int, **kwargs: Any) -> None:
            try:
                await self.let_go.wait()
            finally:
                await asyncio.sleep(0.01)  # tools are released
                self.released += 1
            await self._agent_loop_postprocess(make_output(), False, uid=uid, session_id=session_id, global_steps=1)

    async def write(keys: list[str], **_: Any) -> None:
        made.writing.set()
        await asyncio.sleep(0.01)
        made.puts += [(RowKey.parse(key).conversation, "row") for key in keys]

    made = Worker()

    async def put(key: str, tag: dict[str, Any], **_: Any) -> None:
        made.puts.append((key, tag["status"]))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    monkeypatch.setattr(row_store.transfer_queue, "async_kv_batch_put", write)

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in ("_compute_score", "_compute_teacher_logprobs"):
        monkeypatch.setattr(MultiTurnWorker.__mro__[1], name, nothing)
    return made


def make_output() -> Any:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())


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
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

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
    from verl_multiturn.verl_bridge.workers.group_end import GroupEnd
    from verl_multiturn.verl_bridge.workers.manager import MultiTurnManager
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    async def run(*_: Any, session_id: int, **__: Any) -> None:
        if session_id == 1:
            raise RewardContractError("it returned None")
        await worker.let_go.wait()

    monkeypatch.delattr(type(worker), "_run_agent_loop")
    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_run_agent_loop", run)
    group = start(worker, "a")
    told = await worker.finished(0)
    assert (told, group.done()) == ([("a", GroupEnd(0.0, 0.0, mistake="it returned None"))], False)

    manager: Any = object.__new__(MultiTurnManager)
    manager.__dict__ |= {"_starts": {}, "_polls": {0: "poll"}, "_seen": {}, "_ends": {}, "_raised": 0, "_groups": {}}
    monkeypatch.setattr("ray.wait", lambda polls, **_: (polls, []))
    monkeypatch.setattr("ray.get", lambda _: told)
    manager._collect()
    assert manager.mistake == "it returned None"
    worker.let_go.set()
    await group


async def test_a_batch_whose_conversations_all_raised_ends_by_the_first_error(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.workers.manager import MultiTurnManager
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    async def run(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no share")

    monkeypatch.delattr(type(worker), "_run_agent_loop")
    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_run_agent_loop", run)
    await start(worker, "a")
    told = await worker.finished(0)
    assert told[0][1].error.startswith("ZeroDivisionError: no share (test_manager.py:")
    manager: Any = object.__new__(MultiTurnManager)
    manager.__dict__ |= {"_starts": {}, "_polls": {0: "poll"}, "_seen": {}, "_ends": {}, "_raised": 0, "_groups": {}}
    monkeypatch.setattr("ray.wait", lambda polls, **_: (polls, []))
    monkeypatch.setattr("ray.get", lambda _: told)
    manager._collect()
    assert manager.mistake == ""
    manager.blame_raised()
    assert manager.mistake.startswith(
        "no group of a batch is left; the first of its conversations that raised: ZeroDivisionError: no share ("
    )
    manager.mistake = ""
    assert manager.take_raised() > 0
    manager.blame_raised()
    assert manager.mistake == ""


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
    """Only a running put to TransferQueue must be waited for, see above."""
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

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
    assert worker.puts == [("a", "running")]


async def test_a_conversation_whose_reward_is_waited_for_takes_no_room_in_the_cache(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.rollout.life import Life, current, live
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    over: list[bool] = []

    async def score(*_: Any, **__: Any) -> None:
        over.append(current().asks_no_more)  # type: ignore[union-attr]

    monkeypatch.setattr(MultiTurnWorker.__mro__[1], "_compute_score", score)
    with live(Life("r", "a")) as conversation:
        assert not conversation.asks_no_more
        await worker._agent_loop_postprocess(make_output(), False, uid="a", session_id=0, global_steps=1)
    assert over == [True]


async def test_a_conversation_without_rows_is_none_of_the_group(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    await worker._agent_loop_postprocess([], False, uid="a", session_id=3)
    assert (worker.puts, "conversation a_3 has no rows" in caplog.text) == ([], True)


async def test_conversations_that_end_together_share_a_put(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.compat import row_store

    shared: list[int] = []
    all_come, come, put = asyncio.Event(), [], worker._puts.put

    async def write(keys: list[str], **_: Any) -> None:
        shared.append(len(keys))
        await all_come.wait()

    async def enter(rows: Any, partition_id: str) -> None:
        come.append(rows)
        if len(come) == 20:
            all_come.set()
        await put(rows, partition_id)

    monkeypatch.setattr(row_store.transfer_queue, "async_kv_batch_put", write)
    worker._puts.put = enter
    worker.let_go.set()
    await asyncio.gather(*(start(worker, f"{number}") for number in range(10)))
    assert (sum(shared), len(shared) <= 2) == (20, True)


async def test_a_row_that_cannot_be_written_fails_its_own_group_alone(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.compat import row_store

    written: list[str] = []

    async def write(keys: list[str], **_: Any) -> None:
        await asyncio.sleep(0.01)
        if "b_1_0" in keys:
            raise RuntimeError("no room")
        written.extend(keys)

    monkeypatch.setattr(row_store.transfer_queue, "async_kv_batch_put", write)
    worker.let_go.set()
    await asyncio.gather(*(start(worker, uid) for uid in "abc"))
    assert sorted(written) == ["a_0_0", "a_1_0", "b_0_0", "c_0_0", "c_1_0"]
    assert {key: status for key, status in worker.puts if status != "running"} == {
        "a": "finished", "b": "failure", "c": "finished"
    }  # fmt: skip
