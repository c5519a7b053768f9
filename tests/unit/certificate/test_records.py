"""Records: those that older versions wrote, and texts that UTF-8 cannot hold."""

import json
import sys
from pathlib import Path

from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.support.sample_records import sample_record
from verl_multiturn.cli.main import app
from verl_multiturn.records.json_text import line_of

# A record as it was before conversations had several rows: receipts without `row` and `places`, and nothing about an
# interaction. The prompt is 1 2; the model said 7 8, a tool answered 4, and the model said 9.
_OLD = {
    "request_id": "r1",
    "stop_reason": "finished",
    "valid": True,
    "step": 3,
    "uid": "u",
    "messages": [{"role": "user", "content": "Q"}],
    "calls": [],
    "tool_rewards": {},
    "differences": [],
    "error": "",
    "generate_s": 0.1,
    "tools_s": 0.0,
    "prompt_length": 2,
    "ids": [1, 2, 7, 8, 4, 9],
    "mask": [0, 0, 1, 1, 0, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
    "versions": [-1, -1, 3, 3, -1, 3],
    "turn_ids": [0, 0, 0, 0, 1, 1],
    "sources": [0, 0, 1, 1, 3, 1],
    "receipts": {
        "request_id": "r1",
        "uid": "u",
        "session_id": 0,
        "generations": [
            {
                "prompt_tokens": 2,
                "prompt_digest": "2cc5e4d47c5f3c5fbe635a5a5b7bb392",
                "max_tokens": 10,
                "ids": [7, 8],
                "logprobs": [-0.5, -0.25],
                "versions": [3, 3],
            },
            {
                "prompt_tokens": 5,
                "prompt_digest": "cc07ee7d10a192bb04763b1a56145116",
                "max_tokens": 7,
                "ids": [9],
                "logprobs": [-1.0],
                "versions": [3],
            },
        ],
    },
}


def test_old_records_can_be_verified(tmp_path: Path) -> None:
    newer = {**_OLD, "receipts": {**_OLD["receipts"], "void": False, "invalid": False}}  # type: ignore[dict-item]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(_OLD) + "\n" + json.dumps(newer).replace('"r1"', '"r2"') + "\n")
    done = CliRunner().invoke(app, ["verify", str(path)])
    said, told = done.output.splitlines()
    assert (done.exit_code, said) == (0, "ok 2 records, 6 sampled tokens, 0 violations")
    assert json.loads(told) == {
        "records": 2,
        "sampled_tokens": 6,
        "violations": 0,
        "torn": 0,
        "damaged": 0,
        "repeated": 0,
    }
    path.write_text(json.dumps({**_OLD, "ids": [1, 2, 7, 8, 4, 6]}) + "\n")
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "request r1" in done.output


def test_the_quickstarts_readers(tmp_path: Path) -> None:
    """Read a lone surrogate in the model's arguments, and a torn line."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    from report import merge_records  # type: ignore[import-not-found]

    text = "half a pair: \ud83d, Größe"
    (call,) = sample_record()["calls"]
    record = sample_record(calls=[{**call, "text": text}])
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "h-1.jsonl"
    path.write_text(json.dumps(record)[:20] + "\n" + json.dumps(record) + "\n" + json.dumps(record)[:30])
    (merged,) = merge_records(tmp_path)
    assert merged["calls"][0]["text"] == "half a pair: \ufffd, Größe"
    assert (tmp_path / "trajectories.jsonl").read_bytes() == line_of(merged)
    assert "Größe".encode() in line_of(merged)
