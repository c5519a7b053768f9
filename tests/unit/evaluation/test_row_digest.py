"""The name of a row's content, the same in each kind of file and by each reader."""

import datetime
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.files import read_rows, row_digest

ROW: dict[str, Any] = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 2 ="}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3, "tools_kwargs": {"calculator": {"create_kwargs": {"limit": 2}}}, "weights": [0.5, 1.0]},
}


def test_it_is_the_digest_of_this_text() -> None:
    text = (
        '{"data_source":"sums","extra_info":{"index":3,"tools_kwargs":{"calculator":{"create_kwargs":{"limit":2}}},'
        '"weights":[0.5,1]},"prompt":[{"content":"2 + 2 =","role":"user"}],'
        '"reward_model":{"ground_truth":"4","style":"rule"}}'
    )
    assert row_digest(ROW) == hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "f2bc0b38cb0f5962"


def test_types_of_readers_do_not_count() -> None:
    extra = ROW["extra_info"]
    read = {
        "reward_model": {"ground_truth": "4", "style": "rule", "other": None},
        "data_source": np.str_("sums"),
        "ability": None,
        "prompt": np.array(ROW["prompt"], dtype=object),
        "extra_info": {**extra, "index": np.int64(3), "weights": np.array([0.5, 1.0]), "question": None},
    }
    assert row_digest(read) == row_digest(ROW)


@pytest.mark.parametrize(
    "change",
    [
        {"data_source": "words"},
        {"prompt": [{"role": "system", "content": "2 + 2 ="}]},
        {"reward_model": {"style": "rule", "ground_truth": "5"}},
        {"reward_model": {"style": "rule", "ground_truth": 4}},
        {"extra_info": {**ROW["extra_info"], "index": 4}},
        {"extra_info": {**ROW["extra_info"], "tools_kwargs": {"calculator": {}}}},
        {"extra_info": {**ROW["extra_info"], "weights": [1.0, 0.5]}},
        {"images": [{"bytes": b"png"}]},
    ],
)
def test_what_a_row_says_counts(change: dict[str, Any]) -> None:
    assert row_digest(ROW | change) != row_digest(ROW)


def test_odd_values() -> None:
    row = {
        "at": datetime.datetime(2026, 11, 27),
        "image": b"\x00",
        "nan": float("nan"),
        "big": 1 << 70,
        "half": "\ud800",
    }
    assert row_digest(row) == row_digest(dict(reversed(row.items())))
    with pytest.raises(ConfigError, match="a row holds a object; hash the row as its parquet or JSONL file has it"):
        row_digest({"a": object()})


keys = st.sampled_from(["index", "split", "question", "tools"])
leaves = st.none() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=5)


@st.composite
def files(draw: Any) -> list[dict[str, Any]]:
    """Draw rows of one shape, as a file has them: a key has one type, and may be missing."""
    kinds = draw(st.dictionaries(keys, st.sampled_from([st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=5)])))
    row = st.fixed_dictionaries({"data_source": st.text(max_size=5)}, optional={name: kinds[name] for name in kinds})
    inner = st.fixed_dictionaries({"a": st.integers(0, 3)}, optional={"b": st.none() | st.integers(0, 3)})
    rows = st.tuples(row, st.none() | inner, st.lists(st.floats(-3, 3) | st.integers(-3, 3), max_size=3))
    return [{**own, "extra_info": extra, "list": numbers} for own, extra, numbers in draw(st.lists(rows, min_size=1))]


@given(files())
def test_parquet_pandas_and_json_agree(rows: list[dict[str, Any]]) -> None:
    wanted = [row_digest(json.loads(json.dumps(row))) for row in rows]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    table = pq.read_table(file)
    names = {name for row in rows for name in row}
    if set(table.column_names) == names:  # from_pylist takes the columns of the first row
        assert [row_digest(row) for row in table.to_pylist()] == wanted
        frame = table.to_pandas(integer_object_nulls=True, types_mapper=pd.ArrowDtype)
        assert [row_digest(row) for row in frame.astype(object).where(frame.notna(), None).to_dict("records")] == wanted


def test_both_kinds_of_file_are_read_alike(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"extra_info": {"index": 1, "split": "test"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [[row_digest(row) for row in read_rows(path, [path.suffix])] for path in sorted(tmp_path.iterdir())]
    assert found[0] == found[1] == [row_digest(row) for row in rows]
