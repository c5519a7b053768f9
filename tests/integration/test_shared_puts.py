"""Rows of several conversations in one put: who shares one, who gets an error, and the rest after a cancellation."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Queue:
    """A TransferQueue whose puts wait until the test opens the gate, and which refuses some rows."""

    def __init__(self) -> None:
        self.puts: list[list[str]] = []
        self.rows: dict[str, Any] = {}
        self.bad: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.under_way = self.most = 0

    async def async_kv_batch_put(self, keys: list[str], partition_id: str, fields: Any, tags: list[Any]) -> None:
        self.puts.append(keys)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.gate.wait()
        self.under_way -= 1
        if error := next((self.bad[key] for key in keys if key in self.bad), None):
            raise error
        for index, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            self.rows[key] = partition_id, tag, {name: fields[name][index] for name in fields.keys()}  # noqa: SIM118


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    from verl_multiturn.verl_bridge.compat import row_store

    made = Queue()
    monkeypatch.setattr(row_store, "transfer_queue", made)
    yield made
    assert made.under_way == 0


def row(key: str, tokens: int = 2, **columns: Any) -> Any:
    import torch

    from verl_multiturn.verl_bridge.compat.row_store import NewRow

    return NewRow(key, {"name": key}, {"ids": torch.full((tokens,), int(key[1:] or 0)), "text": key, **columns})


def put(puts: Any, *rows: Any, partition_id: str = "train") -> asyncio.Task[None]:
    return asyncio.ensure_future(puts.put(rows, partition_id))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def make_puts() -> Any:
    from verl_multiturn.verl_bridge.workers.shared_puts import SharedPuts

    return SharedPuts()


async def test_rows_that_come_during_a_put_go_in_one_behind_it(queue: Queue) -> None:
    puts = make_puts()
    first = put(puts, row("a0"))
    await turns()
    others = [put(puts, row(f"b{n}", tokens=1 + n), row(f"c{n}")) for n in range(4)]
    await turns()
    assert queue.puts == [["a0"]]
    queue.gate.set()
    await asyncio.gather(first, *others)
    assert queue.puts == [["a0"], ["b0", "c0", "b1", "c1", "b2", "c2", "b3", "c3"]]
    assert queue.most == 1
    where, tag, columns = queue.rows["b3"]
    assert (where, tag, columns["ids"].tolist(), columns["text"]) == ("train", {"name": "b3"}, [3, 3, 3, 3], "b3")
    await put(puts, row("d0"))  # the lane is used again
    assert queue.puts[-1] == ["d0"]


async def test_nobody_is_done_before_the_put_of_all_its_rows(queue: Queue) -> None:
    puts = make_puts()
    tasks = [put(puts, row("a0")), put(puts, row("b0"))]
    await turns()
    assert not any(task.done() for task in tasks)
    queue.gate.set()
    await asyncio.gather(*tasks)
    assert sorted(queue.rows) == ["a0", "b0"]


async def test_rows_of_other_columns_types_or_partitions_share_no_put(queue: Queue) -> None:
    import torch

    puts = make_puts()
    queue.gate.set()
    await asyncio.gather(
        *(put(puts, row(f"a{n}"), row(f"b{n}", more=1), row(f"c{n}", text=torch.ones(1))) for n in range(2)),
        *(
            put(puts, row(f"d{n}", text=torch.ones(1).double()), row(f"e{n}", at=torch.ones(4, 5 + n)))
            for n in range(2)
        ),
        *(put(puts, row(f"f{n}", at=torch.ones(5 + n, 2)), row(f"g{n}", at=torch.ones(2 + n, 4))) for n in range(2)),
        put(puts, row("v0"), partition_id="val"),
    )
    assert sorted(queue.puts) == [
        ["a0", "a1"], ["b0", "b1"], ["c0", "c1"], ["d0", "d1"], ["e0", "e1"], ["f0", "f1"], ["g0"], ["g1"], ["v0"]
    ]  # fmt: skip
    assert {key: found[0] for key, found in queue.rows.items() if found[0] != "train"} == {"v0": "val"}


async def test_rows_of_one_conversation_may_have_different_columns(queue: Queue) -> None:
    queue.gate.set()
    await put(make_puts(), row("a0"), row("a1", teacher=1))
    assert [sorted(queue.rows[key][2]) for key in ("a0", "a1")] == [["ids", "text"], ["ids", "teacher", "text"]]


async def test_a_put_that_fails_is_done_again_row_by_row(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    puts = make_puts()
    queue.bad["b1"] = RuntimeError("no room for b1")
    tasks = {key: put(puts, *(row(each) for each in key.split())) for key in ("a0", "b0 b1", "c0", "d0")}
    await turns()
    queue.gate.set()
    errors = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert [type(error) for error in errors] == [type(None), RuntimeError, type(None), type(None)]
    assert str(errors[1]) == "no room for b1"
    assert sorted(queue.rows) == ["a0", "b0", "c0", "d0"]
    assert queue.puts[-5:] == [["a0"], ["b0"], ["b1"], ["c0"], ["d0"]]
    assert "a put of 5 rows has failed, and each is put by itself: RuntimeError: no room for b1" in caplog.text
    await put(puts, row("e0"))
    assert "e0" in queue.rows


async def test_a_row_that_fails_by_itself_is_not_tried_again(queue: Queue) -> None:
    queue.gate.set()
    queue.bad["a0"] = RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        await put(make_puts(), row("a0"))
    assert queue.puts == [["a0"]]


async def test_a_cancellation_takes_back_what_waits_and_no_other_row(queue: Queue) -> None:
    puts = make_puts()
    first = put(puts, row("a0"))
    await turns()
    cancelled, other = put(puts, row("b0"), row("b1")), put(puts, row("c0"))
    await turns()
    cancelled.cancel()
    await turns()
    assert cancelled.cancelled()  # without waiting for the put that is under way
    queue.gate.set()
    await asyncio.gather(first, other)
    assert sorted(queue.rows) == ["a0", "c0"]


async def test_a_cancellation_waits_for_the_put_that_is_under_way(queue: Queue) -> None:
    puts = make_puts()
    first = put(puts, row("a0"))
    await turns()
    shared = [put(puts, row("b0")), put(puts, row("c0"))]
    opened, queue.gate = queue.gate, asyncio.Event()
    opened.set()
    await first
    await turns()
    assert queue.puts[-1] == ["b0", "c0"]
    for _ in range(2):  # it may be cancelled again
        shared[0].cancel()
        await turns()
    assert not any(task.done() for task in shared)
    queue.gate.set()
    await shared[1]
    await asyncio.wait(shared)
    assert shared[0].cancelled()
    assert sorted(queue.rows) == ["a0", "b0", "c0"]


async def test_a_put_has_a_bound(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from verl_multiturn.verl_bridge.workers import shared_puts

    puts = make_puts()
    first = put(puts, row("z0"))
    await turns()
    many = [put(puts, row(f"a{n}")) for n in range(150)]
    await turns()
    queue.gate.set()
    await asyncio.gather(first, *many)
    assert [len(keys) for keys in queue.puts] == [1, 64, 64, 22]

    queue.puts.clear()
    queue.gate.clear()
    monkeypatch.setattr(shared_puts, "_MOST_BYTES", 8_100)
    first = put(puts, row("y0", images={}))
    await turns()
    large = [put(puts, row(f"b{n}", images={"pixels": torch.zeros(1_000)})) for n in range(5)]
    large.append(put(puts, row("c0", images={"pixels": torch.zeros(9_000)})))
    await turns()
    queue.gate.set()
    await asyncio.gather(first, *large)
    assert [len(keys) for keys in queue.puts] == [1, 2, 2, 1, 1]


async def test_puts_run_in_no_conversations_context(queue: Queue) -> None:
    from verl_multiturn.calls.timeline import Timeline, is_kept
    from verl_multiturn.rollout.life import Life, live

    kept: list[bool] = []
    queue.gate.set()
    inner = queue.async_kv_batch_put

    async def look(**given: Any) -> None:
        kept.append(is_kept())
        await inner(**given)

    queue.async_kv_batch_put = look  # type: ignore[method-assign]
    with live(Life("r", timeline=Timeline())):
        await put(make_puts(), row("a0"))
    assert kept == [False]
