"""The five estimators of docs/write/algorithms.md, called by verl, have the values of the originals."""

from pathlib import Path
from typing import Any

import pytest

from tests.long.training import algorithms

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("name", algorithms.ORIGINALS)
def test_the_page_has_the_values_of_the_original(name: str, tmp_path: Path) -> None:
    files = algorithms.page_files(tmp_path)
    assert algorithms.largest_difference(name, files[name], groups=60) <= 1e-6


def test_another_estimator_is_told_from_the_original(tmp_path: Path) -> None:
    """Whatever is compared, a difference shows: in values, and beside the tokens that are trained."""
    files = algorithms.page_files(tmp_path)
    assert algorithms.largest_difference("rloo", files["dr_grpo"], groups=20) > 0.1
    file = tmp_path / "skewed.py"
    file.write_text(files["gigpo"].read_text().replace("weight * (r - means[s])", "weight * (r - 1.001 * means[s])"))
    assert 1e-6 < algorithms.largest_difference("gigpo", file, groups=20) < 0.1


def test_the_batches_of_a_run_are_read_from_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record and its join become the row that verl had: mask, score on the last token, uid."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.support.sample_records import sample_record

    scores = [1.0, 0.0, 0.5]
    records = [sample_record(request_id=f"r-{i}", number=i) for i in range(len(scores))]
    monkeypatch.setattr(algorithms, "read_records", lambda folder: iter(records))
    sampled = sum(count for row in records[0]["rows"] for count, mask, *_ in row["runs"] if mask)
    values = [1.0 / (0.5 + 1e-6), -1.0 / (0.5 + 1e-6), 0.0]
    lines: list[dict[str, Any]] = [
        {"request_id": f"r-{i}", "uid": "group-0", "number": i, "row": 0, "validation": False, "score": score,
         "advantages": [(score - 0.5) / (0.5 + 1e-6)] * sampled}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    (tmp_path / "records" / "join").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "records" / "join" / "step-000001-x.parquet")
    (batch,) = algorithms.stored_batches(tmp_path)
    assert batch.rewards.sum(1).tolist() == scores
    assert batch.mask.sum(1).tolist() == [sampled] * len(scores)
    assert len(values) == len(scores)
    found = algorithms.quickstart_figures([tmp_path], tmp_path)
    assert found["batches"] == 1
    assert found["relative"] <= 1e-6
    assert found["stored_relative"] <= 1e-6
    assert found["masks_differ"] == 0
