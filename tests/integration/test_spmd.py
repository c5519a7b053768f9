"""`generate_sequences` over two gloo processes: rank 0 runs the tools, both ranks return the same batch."""

import os
import pickle
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT, free_port
from tests.support.warm_python import stack_python, variables
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.summaries import summary_of
from verl_multiturn.records.verify.record import verify_record

pytestmark = pytest.mark.stack

TOOLS = """
tools:
  - class_name: tests.integration.spmd_worker.CountTool
    tool_schema: {type: function, function: {name: count, description: counts, parameters: {type: object}}}
"""


def test_two_ranks_one_execution(tmp_path: Path) -> None:
    import torch

    (tmp_path / "tools.yaml").write_text(TOOLS)
    port = free_port()
    shared = {
        **variables(),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RAY_LOCAL_WORLD_SIZE": "2",
        "COUNT_FILE": str(tmp_path / "count"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{variables()['PYTHONPATH']}",
    }
    command = [stack_python(), "-m", "tests.integration.spmd_worker", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, cwd=ROOT, stdout=log, stderr=log)
            for rank in range(2)
        ]
        statuses = [rank.wait(timeout=550) for rank in ranks]
    assert statuses == [0, 0], (tmp_path / "log").read_text()[-3000:]

    executions = [line.split() for line in (tmp_path / "count").read_text().splitlines()]
    # Four requests with two calls and then one, in three batches. Each was executed once, all in one process.
    assert sorted(Counter(request for request, _ in executions).values()) == [3] * 12
    assert len({process for _, process in executions}) == 1

    (tensors, rows), (other_tensors, other_rows) = (
        pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes()) for rank in range(2)
    )
    assert tensors.keys() == other_tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(value, other_tensors[key]), key
    assert str(rows) == str(other_rows)
    assert rows["stop_reason"] == ["finished"] * 3 + ["engine_error"]
    assert rows["max_global_steps"] == [5] * 4
    assert tensors["prompts"].shape == (4, 320)
    assert tensors["responses"].shape == (4, 256)
    # The last conversation is invalid: nothing of it is trained, whatever was sampled.
    assert tensors["response_mask"].any(dim=1).tolist() == [True, True, True, False]
    assert bool(((tensors["rollout_versions"] == 5).any(dim=1)).all())
    # Rewards count twice (weight 2): 0.25 for each of three calls, and 1 at the end. They lie on sampled tokens.
    scores = tensors["turn_rewards"]
    assert scores.sum(dim=1).tolist() == [3.5] * 3 + [0.0]
    assert [[float(x) for x in row if x] for row in scores] == [[1.0, 0.5, 2.0]] * 3 + [[]]
    assert bool(((scores != 0) <= (tensors["response_mask"] == 1)).all())
    assert "rm_scores" not in tensors
    mask, attention = tensors["response_mask"], tensors["attention_mask"][:, 320:]
    assert set(tensors["attention_mask"].unique().tolist()) == {0, 1}
    assert set(mask.unique().tolist()) == {0, 1}
    assert bool(((mask == 1) <= (attention == 1)).all())
    assert bool(((tensors["rollout_log_probs"] != 0) == (mask == 1))[:3].all())
    assert torch.equal(tensors["position_ids"][:, -1], tensors["attention_mask"].sum(dim=1) - 1)

    errors = {(tmp_path / f"error{rank}.txt").read_text() for rank in range(2)}
    assert len(errors) == 1
    assert "need_tools_kwargs is set" in errors.pop()

    records = list(read_records(tmp_path / "records"))
    first = records[:4]
    assert [record["uid"] for record in records] == ["u", "v", "u", "u"] * 3
    assert [record["number"] for record in first] == [0, 0, 1, 2]
    assert [record["stop_reason"] for record in first] == rows["stop_reason"]
    assert all(verify_record(record).violations == [] for record in records)
    assert all(summary_of(record)["sampled_tokens"] for record in records)

    for rank in range(2):
        replaced = (tmp_path / f"replaced{rank}.txt").read_text()
        assert "rm_scores" in replaced
        assert "turn_rewards" not in replaced
        assert "(3 violations in 4 rows)" in (tmp_path / f"uncertified{rank}.txt").read_text()


async def test_a_batch_is_not_rolled_out_within_a_loop() -> None:
    from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

    rollout = object.__new__(AsyncSGLangRollout)
    with pytest.raises(RuntimeError, match=r"cannot be called inside a running event loop; .*asyncio\.to_thread"):
        rollout.generate_sequences(None)  # type: ignore[arg-type]


def test_the_error_that_the_other_ranks_get() -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.loops.spmd import _sendable

    first = ConfigError("the first")
    assert _sendable(BaseExceptionGroup("two", [ExceptionGroup("one", [first]), ValueError("the second")])) is first

    class Local(Exception):
        """An error that cannot be pickled."""

    found = _sendable(Local("of this test"))
    assert (type(found), str(found)) == (RuntimeError, "Local: of this test")


async def test_conversations_of_several_rows_are_refused() -> None:
    """`generate_sequences` returns a row for each row."""
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

    rollout = object.__new__(AsyncSGLangRollout)
    rollout.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2"))
    rollout.config = OmegaConf.create({"custom": {"multiturn": {"context": {"mode": "window", "turns": 2}}}})
    with pytest.raises(ConfigError, match=r"context\.mode=window makes several; set the mode to append"):
        await rollout._build_runner({})
