"""Records of sessions whose token ids show what a rule hides."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_records import sample_session
from tests.unit.records.test_writer import START
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write.records import SEEN, RecordWriter
from verl_multiturn.records.write.redaction import Redaction


def said(text: str) -> Callable[[Sequence[int]], str]:
    return lambda ids: text


@pytest.mark.parametrize(
    ("rule", "text", "is_seen"),
    [
        (r"re:sk-[a-z]+", "the key is sk-abc", True),
        (r"re:sk-[a-z]+", "no key", False),
        ("ground_truth", "it is\\nforty", True),
        ("ground_truth", "it is fortytwo", False),
        ("turn", "0 1 2", False),
        (r"re:Hello", "", True),
        (r"re:refused", "", False),
        ("arguments", "", True),
    ],
)
def test_ids_that_show_it(rule: str, text: str, is_seen: bool) -> None:
    record: dict[str, Any] = sample_session()
    record["sample"]["ground_truth"] = "is\nforty"
    first, *_ = record["session"]["requests"]
    first["messages"] = [{"role": "user", "content": "Hello"}]
    record["session"]["requests"].append({**first, "refused": "too_long", "messages": [{"content": "refused"}]})
    record["calls"] = [{"name": "f", "arguments": {"x": 1}, "text": "", "turn": 0}]
    assert Redaction([rule]).is_seen(record, said(text)) is is_seen


def test_of_such_a_session_counts_are_kept_alone(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, START, redact=["re:secret"], decode=lambda ids: "sec" + "ret" * (11 in ids))
    record = sample_session(request_id="a", rows=[], generations=[])
    shown = sample_session(request_id="b")
    shown["rows"][0]["ids"][0] = 11
    shown["sample"] |= {"index": "mine", "data_source": "mine"}
    fates: list[Any] = []
    for each in (record, shown):
        writer.keep(lambda each=each: each, {"request_id": each["request_id"], "at": 8.0}, fates.append)  # type: ignore[misc]
    writer.close()
    assert fates == ["", SEEN]
    records = Records(tmp_path)
    assert [each["request_id"] for each in records.records()] == ["a"]
    (_, line) = records.lines()
    assert (line["event"], line["why"], line["offset"]) == ("end", SEEN, None)
    assert line["summary"]["turns"] == len(shown["generations"])
    assert "mine" not in "".join(path.read_text() for path in tmp_path.glob("*.lines.jsonl"))
