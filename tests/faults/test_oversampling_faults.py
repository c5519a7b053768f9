"""Over-sampled groups with the real worker, loop and tools: kept samples, cut ones, and leftovers of a cut."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Any:
    """Return a function that makes a worker, of samples 0 to 5 the first 4 valid ones of which stay."""
    from benchmarks.oversample_world import Script, ScriptedWorker

    def made(script: type[Script] = Script, n: int = 4, over_sample_rate: float = 0.25) -> ScriptedWorker:
        return ScriptedWorker(script(), tokenizer, tmp_path, n=n, over_sample_rate=over_sample_rate)

    return made


def balanced(worker: Any) -> bool:
    """Return whether every `create` had one `release`."""
    methods = worker._script.methods
    created = {sample: count for (sample, name), count in methods.items() if name == "create"}
    released = {sample: count for (sample, name), count in methods.items() if name == "release"}
    return created == released == dict.fromkeys(created, 1)


def script(**methods: Any) -> Any:
    from benchmarks.oversample_world import Script

    return type("Scripted", (Script,), methods)


async def test_the_first_n_stay_under_their_own_numbers_and_the_others_put_no_row(make: Any) -> None:
    async def tool(self: Any, sample: Any, call: int) -> None:
        await asyncio.sleep(60 if sample[1] in (0, 3) else 0.01)

    worker = make(script(use_tool=tool))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await worker.run_groups([0, 1])
    assert loop.time() - began < 60
    assert sorted(worker.rows) == [f"row{row}_{session}_0" for row in (0, 1) for session in (1, 2, 4, 5)]
    assert [int(worker.rows[key]["session_id"]) for key in sorted(worker.rows)] == [1, 2, 4, 5] * 2
    assert worker.status == {"row0": "finished", "row1": "finished"}
    assert len([key for key in worker._script.methods if key[1] == "create"]) == 12
    assert balanced(worker)
    cut, seconds, *_ = await worker.news()
    assert cut == 4
    assert seconds > 0
    assert (await worker.news())[:2] == (0, 0.0)


@pytest.mark.parametrize(
    ("validate", "rate", "prompt", "rows"),
    [
        (True, 0.25, {}, 1),
        (True, 0.25, {"__rollout_n__": 3}, 3),
        (False, 0, {}, 4),
        (False, 0.5, {}, 4),
        (False, 0.25, {"__rollout_n__": 2}, 2),
    ],
)
async def test_how_many_begin_and_stay(make: Any, validate: bool, rate: float, prompt: Any, rows: int) -> None:
    begun = {0.5: 8, 0: 4, 0.25: 3}[rate] if not validate else rows
    worker = make(over_sample_rate=rate)
    await worker.run_groups([0], validate=validate, **prompt)
    assert len(worker.rows) == rows
    cut = (await worker.news()).cut
    assert cut == begun - rows
    assert balanced(worker)


async def test_generations_of_cut_samples_end_before_their_group(make: Any) -> None:
    async def generate(self: Any, sample: Any, tokens: int) -> None:
        await asyncio.sleep(60 if sample[1] >= 4 else 0)

    worker = make(script(generate=generate))
    await worker.run_groups([0])
    assert worker.llm_client.running == 0
    assert sorted(worker.rows) == ["row0_0_0", "row0_1_0", "row0_2_0", "row0_3_0"]


async def fail_to_sample(failing: int, sample: Any) -> None:
    if sample[1] < failing:
        raise ConnectionError("the server died")
    await asyncio.sleep(0.02)


@pytest.mark.parametrize(("failing", "sessions"), [(1, None), (2, [2, 3, 4, 5]), (3, [0, 3, 4, 5]), (6, [0, 1, 2, 3])])
async def test_invalid_samples_stay_only_where_valid_ones_are_missing(
    make: Any, failing: int, sessions: list[int] | None
) -> None:
    async def generate(self: Any, sample: Any, tokens: int) -> None:
        await fail_to_sample(failing, sample)

    worker = make(script(generate=generate))
    await worker.run_groups([0])
    found = sorted(int(row["session_id"]) for row in worker.rows.values())
    assert len(found) == 4
    if sessions is None:
        assert 0 not in found
    else:
        assert found == sessions
    assert [key for key, row in worker.rows.items() if not row["response_mask"].any()] == [
        f"row0_{session}_0" for session in found if session < failing
    ]
    assert worker.status == {"row0": "finished"}
    assert (await worker.news()).cut == 2


async def test_a_tool_that_answers_after_its_group_was_cut(make: Any) -> None:
    answered = []

    async def tool(self: Any, sample: Any, call: int) -> None:
        if sample[1] < 4:
            return
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            answered.append(sample)  # and the call returns, as if nothing had happened

    worker = make(script(use_tool=tool))
    await worker.run_groups([0])
    assert sorted(answered) == [(0, 4), (0, 5)]
    assert sorted(worker.rows) == ["row0_0_0", "row0_1_0", "row0_2_0", "row0_3_0"]
    assert worker.status == {"row0": "finished"}
    assert balanced(worker)
    assert worker._script.methods[(0, 4), "execute"] == 1


async def test_a_group_of_which_all_end_in_the_same_moment(make: Any) -> None:
    gate = asyncio.Barrier(6)

    async def tool(self: Any, sample: Any, call: int) -> None:
        await gate.wait()

    worker = make(script(use_tool=tool))
    await worker.run_groups([0])
    assert len(worker.rows) == 4
    assert (await worker.news()).cut == 2
    assert balanced(worker)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.03, 0.05])
async def test_a_group_that_is_cancelled_while_samples_end_writes_nothing_afterwards(make: Any, after_s: float) -> None:
    async def tool(self: Any, sample: Any, call: int) -> None:
        await asyncio.sleep(0.01 * sample[1])

    worker = make(script(use_tool=tool))
    with worker.connected():
        group = asyncio.ensure_future(worker.run_group(0))
        await asyncio.sleep(after_s)
        await worker.cancel(["row0"])
        written = list(worker.rows)
        await asyncio.wait({group})
    assert list(worker.rows) == written
    assert len(written) <= 4
    assert balanced(worker)
    assert worker._oversampled == {}


async def test_an_author_s_mistake_fails_the_group_and_the_others_stay(make: Any) -> None:
    from verl_multiturn import ToolContractError

    async def tool(self: Any, sample: Any, call: int) -> None:
        if sample[1] == 0:
            raise ToolContractError("the wrong type")
        await asyncio.sleep(0.01)

    worker = make(script(use_tool=tool))
    await worker.run_groups([0])
    assert worker.status == {"row0": "failure"}
    assert len(worker.rows) == 4
    assert "row0_0_0" not in worker.rows
    assert balanced(worker)


async def test_a_cut_sample_with_a_blocked_thread_delays_its_group_by_five_seconds_at_most(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import oversample_world
    from verl_multiturn.calls import calls

    group_is_over = threading.Event()

    def execute(self: Any, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
        sample = oversample_world._sample.get()
        self.script.methods[sample, "execute"] += 1
        if sample[1] >= 4:
            group_is_over.wait()
        return oversample_world.ToolResponse("ok")

    assert calls._ABANDONED_S == 5.0
    monkeypatch.setattr(calls, "_ABANDONED_S", 0.05)
    monkeypatch.setattr(oversample_world.WaitTool, "execute", execute)
    worker = make()
    await worker.run_groups([0])
    group_is_over.set()
    assert sorted(worker.rows) == ["row0_0_0", "row0_1_0", "row0_2_0", "row0_3_0"]
    assert balanced(worker)
