"""Rows of conversations that end together are written to TransferQueue together, as verl would write each."""

import asyncio
from typing import Any

import pytest

from tests.integration.trainer_rows import CALL, make_output

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Queue:
    """Stands in for TransferQueue's module: notes each write, and refuses rows that hold the number 13."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.begun = asyncio.Event()

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        self.writes.append(keys)
        self.begun.set()
        await asyncio.sleep(0)
        names = list(fields.keys())
        for i, key in enumerate(keys):
            row = {name: fields[name].unbind()[i] if hasattr(fields[name], "unbind") else None for name in names}
            if "n" in row and row["n"].tolist() == [13]:
                raise ValueError("an unlucky row")
            self.rows[key] = row
            self.tags[key] = tags[i]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    from verl_multiturn.verl_bridge.compat import stored_rows

    queue = Queue()
    monkeypatch.setattr(stored_rows, "transfer_queue", queue)
    return queue


def put(rows: Any, key: str, number: int = 0, partition_id: str = "train", **more: Any) -> Any:
    import torch

    fields = [{"n": torch.tensor([number]), **more}]
    return rows.async_kv_batch_put(keys=[key], fields=fields, tags=[{"of": key}], partition_id=partition_id)


async def test_rows_that_come_while_others_are_written_go_together(queue: Queue) -> None:
    from verl_multiturn.verl_bridge.compat.gathered_rows import GatheredRows

    rows = GatheredRows()
    first = asyncio.ensure_future(put(rows, "a"))
    await queue.begun.wait()
    await asyncio.gather(first, *(put(rows, key) for key in "bcd"))
    assert queue.writes == [["a"], ["b", "c", "d"]]
    assert queue.tags == {key: {"of": key} for key in "abcd"}
    await put(rows, "e")
    assert queue.writes[2:] == [["e"]]


async def test_a_row_that_fails_fails_alone(queue: Queue) -> None:
    from verl_multiturn.verl_bridge.compat.gathered_rows import GatheredRows

    rows = GatheredRows()
    found = await asyncio.gather(put(rows, "a"), put(rows, "b", 13), put(rows, "c"), return_exceptions=True)
    assert [type(each) for each in found] == [type(None), ValueError, type(None)]
    assert set(queue.rows) == {"a", "c"}
    await put(rows, "d")  # the next ones are written
    assert "d" in queue.rows


async def test_other_columns_and_partitions_are_written_apart(queue: Queue) -> None:
    from verl_multiturn.verl_bridge.compat.gathered_rows import GatheredRows

    rows = GatheredRows()
    await asyncio.gather(
        put(rows, "a"), put(rows, "b", text="more"), put(rows, "c", partition_id="val"), put(rows, "d"), put(rows, "e")
    )
    assert queue.writes == [["a", "d", "e"], ["b"], ["c"]]


async def test_a_cancelled_conversation_leaves_the_others_rows(queue: Queue) -> None:
    from verl_multiturn.verl_bridge.compat.gathered_rows import GatheredRows

    rows = GatheredRows()
    writes = [asyncio.ensure_future(put(rows, key)) for key in "ab"]
    await asyncio.sleep(0)
    writes[0].cancel()
    await asyncio.wait(writes)
    assert writes[0].cancelled()
    assert writes[1].result() is None
    assert set(queue.rows) == {"a", "b"}


def test_verls_method_hands_its_rows_over(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import agent_loop_tq

    from verl_multiturn.verl_bridge.compat.gathered_rows import GatheredRows, gathering

    verls = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    own = Queue()
    monkeypatch.setattr(agent_loop_tq, "tq", own)
    worker = object.__new__(verls)
    worker.processor, worker.mm_processor_kwargs, worker.distillation_enabled = None, {}, False
    worker.reward_loop_worker_handles = None
    outputs = [make_output("u", session, [*[CALL] * session, "2<|im_end|>"]) for session in range(3)]
    for output in outputs:
        output.reward_score, output.extra_fields["reward_extra_info"] = 1.0, {"acc": 1.0}
    rows = [{"uid": "u", "session_id": session, "global_steps": 4} for session in range(3)]

    async def write(method: Any) -> None:
        given = [output.model_copy(deep=True) for output in outputs]
        await asyncio.gather(*(method(worker, each, False, **row) for each, row in zip(given, rows, strict=True)))

    asyncio.run(write(verls._agent_loop_postprocess))
    assert agent_loop_tq.tq is own
    asyncio.run(write(gathering(verls._agent_loop_postprocess, GatheredRows())))
    assert (len(own.writes), queue.writes) == (3, [["u_0_0", "u_1_0", "u_2_0"]])
    assert queue.tags == own.tags
    for key, columns in own.rows.items():
        assert set(columns) == set(queue.rows[key])
        for name, value in columns.items():
            if hasattr(value, "tolist"):
                assert value.tolist() == queue.rows[key][name].tolist(), (key, name)
