"""Rows of finished conversations beside those of verl's own method, in a real TransferQueue of a real Ray."""

import asyncio
import copy
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.integration.vision import picture

pytestmark = [
    pytest.mark.stack,
    pytest.mark.deaths,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]

KIND = "qwen2_5_vl"
DROPPED = {"extra_info", "tools_kwargs", "agent_name", "index", "ability", "session_id", "global_steps", "dummy_tensor"}


class Teacher:
    """verl's manager of a teacher's clients: five ids for each token."""

    teacher_model_configs: ClassVar = {
        "default": SimpleNamespace(num_replicas=1, inference=SimpleNamespace(max_num_seqs=8, name="vllm"))
    }
    distillation_loss_config = SimpleNamespace(topk=5, loss_settings=SimpleNamespace(use_topk=True))

    async def compute_teacher_logprobs_single(self, sequence_ids: list[int], **_: Any) -> tuple[Any, Any]:
        import torch

        await asyncio.sleep(0)
        length = len(sequence_ids)
        ids = torch.arange(length * 5).reshape(length, 5)
        return ids, -2 - ids.float() / 7 - sum(sequence_ids) / 1000


class Judge:
    """verl's handle of a reward worker."""

    @property
    def compute_score(self) -> "Judge":
        return self

    async def remote(self, data: Any) -> dict[str, Any]:
        score = float(data.non_tensor_batch["index"][-1] % 7)
        await asyncio.sleep(0.001 * score)
        return {"reward_score": score, "reward_extra_info": {"acc": score, "said": f"{score} of 7"}}


def make_worker(cls: type, processor: Any, teacher: bool) -> Any:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.workers.shared_puts import SharedPuts

    worker: Any = object.__new__(cls)
    worker.processor, worker.tokenizer = processor, None if processor is None else processor.tokenizer
    worker.mm_processor_kwargs, worker.reward_loop_worker_handles = {}, [Judge()]
    worker.distillation_enabled, worker.teacher_key, worker.teacher_server_manager = teacher, "data_source", Teacher()
    text = SimpleNamespace(vocab_size=1_000_000)
    worker.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))
    worker.config = OmegaConf.create({
        "actor_rollout_ref": {"rollout": {"custom": {"multiturn": {}}, "agent": {"num_workers": 2}}},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"v1": {"trainer_mode": "sync"}},
    })  # fmt: skip
    worker._oversampled, worker._siblings, worker._conversation_ends, worker._row_ends = {}, {}, {}, {}
    worker._puts = SharedPuts()
    return worker


def outputs_of(chance: random.Random, processor: Any) -> Any:
    """Make an agent loop's output: of ours or another, of one row or several, with images or without."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    from verl_multiturn.verl_bridge.loops.output import CertifiedOutput

    ours, rows = chance.random() < 0.5, chance.choice([1, 1, 1, 2, 3])
    measured = chance.random() < 0.8
    made = []
    for row in range(rows):
        prompt, images = [chance.randrange(500) for _ in range(chance.randint(1, 30))], []
        if processor is not None and chance.random() < 0.5:
            images = [picture(28, chance.randint(2, 3), 2, chance.randrange(9)) for _ in range(chance.randint(1, 2))]
            said = "Look. " + "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
            prompt = processor(text=[said], images=images)["input_ids"][0]
        length = chance.choice([1, 8, 8, chance.randint(1, 40)])
        given: dict[str, Any] = {
            "prompt_ids": prompt,
            "response_ids": [chance.randrange(500) for _ in range(length)],
            "response_mask": [chance.randrange(2) for _ in range(length)],
            "num_turns": chance.randint(2, 9),
            "metrics": AgentLoopMetrics(generate_sequences=chance.random()),
            "extra_fields": {"min_global_steps": chance.randrange(3), "max_global_steps": 3, "note": {"deep": [row]}},
        }
        if measured:
            given["response_logprobs"] = [-chance.random() for _ in range(length)]
        if images:
            given["multi_modal_data"] = {"images": images}
        if ours:
            stats = {"valid": True, "conversation": {"row": row, "rows": rows}, "tool_score": 0.25}
            made.append(CertifiedOutput(**given, versions=[1] * length, receipts=b"\x02\0\0\0{}", stats=stats))
        else:
            made.append(AgentLoopOutput(**given))
    return made if rows > 1 or chance.random() < 0.5 else made[0]


def row_of(number: int) -> dict[str, Any]:
    import torch

    return {
        "uid": f"u{number // 4}",
        "session_id": number % 4,
        "index": number,
        "global_steps": 5,
        "raw_prompt": [{"role": "user", "content": f"What is {number}?"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
        "tools_kwargs": {},
        "agent_name": "multiturn_agent",
        "ability": "math",
        "dummy_tensor": torch.tensor([number]),
        "multi_modal_data": {"images": ["none of the model's"]},
    }


async def write(worker: Any, outputs: list[Any], validate: bool) -> None:
    await asyncio.gather(
        *(worker._agent_loop_postprocess(output, validate, **row_of(n)) for n, output in enumerate(outputs))
    )


def read(queue: Any, partition_id: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the tag and the columns of each row of a partition, and remove them."""
    found = {}
    tags = queue.kv_list(partition_id)[partition_id]
    for key, tag in tags.items():
        data = queue.kv_batch_get(keys=[key], partition_id=partition_id)
        found[key] = tag, {name: data[name][0] for name in data.keys()}  # noqa: SIM118  # iterating yields rows
    queue.kv_clear(keys=list(tags), partition_id=partition_id)
    return found


def plain(value: Any) -> Any:
    """Return a value in a form that `==` compares whole."""
    import torch

    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


@pytest.mark.parametrize(
    ("count", "images", "teacher", "validate"),
    [(100, False, False, False), (50, True, False, True), (50, False, True, False)],
)
async def test_the_rows_are_verls(
    queue: Any, processors: dict[str, Any], count: int, images: bool, teacher: bool, validate: bool
) -> None:
    """200 rows in all. With images or a teacher a conversation has one row: verl can do no more.

    So does the next test, of a teacher with several rows.
    """
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    processor = processors[KIND] if images else None
    chance = random.Random(f"{images} {teacher}")
    outputs: list[Any] = []
    while sum(len(output) if isinstance(output, list) else 1 for output in outputs) < count:
        made = outputs_of(chance, processor)
        outputs.append(made[:1] if (teacher or images) and isinstance(made, list) else made)
    partition = "val" if validate else "train"
    verls = make_worker(MultiTurnWorker.__mro__[1], processor, teacher)
    await write(verls, copy.deepcopy(outputs), validate)
    expected = await asyncio.to_thread(read, queue, partition)

    for kept in (True,) if images or teacher else (True, False):
        ours = make_worker(MultiTurnWorker, processor, teacher)
        if not kept:
            ours.config.algorithm.adv_estimator = "of_a_user"
        await write(ours, copy.deepcopy(outputs), validate)
        found = await asyncio.to_thread(read, queue, partition)
        assert found.keys() == expected.keys()
        for key, (tag, columns) in found.items():
            verls_tag, verls_columns = expected[key]
            assert tag == verls_tag
            if teacher and "rollout_receipts" in columns:  # ours hold the teacher's answer, too
                held = bytes(columns["rollout_receipts"].numpy())
                assert b"teacher" in held
                assert columns.pop("rollout_receipts").numel() > verls_columns.pop("rollout_receipts").numel()
            columns.get("metrics", {}).pop("compute_score", None)  # seconds
            verls_columns.get("metrics", {}).pop("compute_score", None)
            if (stats := columns.get("metrics", {}).get("rollout")) is not None:  # of our loops
                assert stats.pop("sample")[:2] == [5, 4 * int(key[1 : key.index("_")]) + int(key.split("_")[1])]
            assert plain(columns) == {
                name: plain(value) for name, value in verls_columns.items() if not (kept and name in DROPPED)
            }
        if not kept:
            assert columns.keys() >= DROPPED


async def test_each_row_of_a_conversation_has_the_teachers_columns_of_verls_conversation_of_that_row(
    queue: Any,
) -> None:
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    chance = random.Random(11)
    made = [output for _ in range(30) if isinstance(output := outputs_of(chance, None), list)]
    assert sum(len(output) > 1 for output in made) >= 5
    ours = make_worker(MultiTurnWorker, None, True)
    await write(ours, copy.deepcopy(made), False)
    found = await asyncio.to_thread(read, queue, "train")
    verls = make_worker(MultiTurnWorker.__mro__[1], None, True)
    await write(verls, copy.deepcopy([row for output in made for row in output]), False)
    alone = list((await asyncio.to_thread(read, queue, "train")).items())
    expected = {key: columns for key, (_, columns) in sorted(alone, key=lambda each: number_of(each[0]))}
    rows = sorted(found.items(), key=lambda each: (number_of(each[0]), int(each[0].rsplit("_", 1)[1])))
    assert len(rows) == len(expected)
    for (_, (_, columns)), verls_columns in zip(rows, expected.values(), strict=True):
        for name in ("teacher_ids", "teacher_logprobs", "input_ids"):
            assert plain(columns[name]) == plain(verls_columns[name])
    await write(ours, copy.deepcopy(made), True)
    checked = await asyncio.to_thread(read, queue, "val")
    assert not any("teacher_logprobs" in columns for _, columns in checked.values()), "a validation asks nothing"


def number_of(key: str) -> int:
    """Return the number of a conversation, by the name of a row."""
    uid, session, _ = key.split("_")
    return 4 * int(uid[1:]) + int(session)


async def test_a_put_that_failed_half_way_is_done_again_and_leaves_each_row_once(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the rows are stored and TransferQueue's controller hears nothing of it, then all of a put is done."""
    from verl_multiturn.verl_bridge.compat import row_store
    from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

    chance = random.Random(3)
    outputs = [outputs_of(chance, None) for _ in range(40)]
    whole, client = row_store.transfer_queue.async_kv_batch_put, queue.get_client()
    tell = client.storage_manager.notify_data_update
    failed: list[str] = []

    async def deaf(*_: Any, **__: Any) -> None:
        failed.append("half")
        raise RuntimeError("the connection was lost")

    async def put(keys: list[str], **given: Any) -> None:
        half = len(keys) > 1 and len(failed) < 2
        monkeypatch.setattr(client.storage_manager, "notify_data_update", deaf if half else tell)
        await whole(keys=keys, **given)
        if len(keys) > 1 and len(failed) < 4:
            failed.append("whole")
            raise RuntimeError("the answer was lost")

    expected_worker = make_worker(MultiTurnWorker, None, False)
    await write(expected_worker, copy.deepcopy(outputs), False)
    expected = await asyncio.to_thread(read, queue, "train")
    monkeypatch.setattr(row_store.transfer_queue, "async_kv_batch_put", put)
    worker = make_worker(MultiTurnWorker, None, False)
    await write(worker, copy.deepcopy(outputs), False)
    found = await asyncio.to_thread(read, queue, "train")
    assert {"half", "whole"} <= set(failed)
    assert found.keys() == expected.keys()
    for key, (tag, columns) in found.items():
        for each in (columns, expected[key][1]):
            each["metrics"].pop("compute_score", None)
        assert (tag, plain(columns)) == (expected[key][0], plain(expected[key][1]))
