"""`generate_sequences` over two gloo processes: rank 0 runs the tools, both ranks return the same batch."""

import contextlib
import os
import pickle
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.stack

TOOLS = """
tools:
  - class_name: tests.integration.spmd_worker.CountTool
    tool_schema: {type: function, function: {name: count, description: counts, parameters: {type: object}}}
"""


def free_port() -> int:
    """Below those that the kernel hands out: Ray and SGLang of other tests take many of them before ours is used."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_two_ranks_one_execution(tmp_path: Path) -> None:
    import torch

    (tmp_path / "tools.yaml").write_text(TOOLS)
    port = free_port()
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RAY_LOCAL_WORLD_SIZE": "2",
        "COUNT_FILE": str(tmp_path / "count"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "tests.integration.spmd_worker", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, cwd=ROOT, stdout=log, stderr=log)
            for rank in range(2)
        ]
        statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0, 0], (tmp_path / "log").read_text()[-3000:]

    executions = [line.split() for line in (tmp_path / "count").read_text().splitlines()]
    # Three requests with two calls and then one: each executed once, all in one process.
    assert sorted(Counter(request for request, _ in executions).values()) == [3, 3, 3]
    assert len({process for _, process in executions}) == 1

    (tensors, rows), (other_tensors, other_rows) = (
        pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes()) for rank in range(2)
    )
    assert tensors.keys() == other_tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(value, other_tensors[key]), key
    assert str(rows) == str(other_rows)
    assert rows["stop_reason"] == ["finished"] * 3
    assert rows["max_global_steps"] == [5] * 3
    assert tensors["prompts"].shape == (3, 320)
    assert tensors["responses"].shape == (3, 256)
    mask, attention = tensors["response_mask"], tensors["attention_mask"][:, 320:]
    assert bool(((mask == 1) <= (attention == 1)).all())
    assert bool(((tensors["rollout_log_probs"] != 0) == (mask == 1)).all())
    assert torch.equal(tensors["position_ids"][:, -1], tensors["attention_mask"].sum(dim=1) - 1)

    errors = {(tmp_path / f"error{rank}.txt").read_text() for rank in range(2)}
    assert len(errors) == 1
    assert "need_tools_kwargs is set" in errors.pop()
