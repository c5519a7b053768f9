"""Records: texts that UTF-8 cannot hold, and torn lines, as the quickstart's report reads them."""

import json
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.support.sample_records import sample_record
from verl_multiturn.records.json_text import line_of


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
