"""Contents of an evaluation's folder, and which rows may be shown of one that is not over."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.evaluation_samples import (
    FAILED,
    INVALID,
    LATER,
    OPEN,
    OTHER,
    START,
    data_row,
    write_evaluation,
)
from tests.support.sample_records import sample_run_file
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.endings import ended_in
from verl_multiturn.evaluation.plan import SampleId, begin
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.records.read import joins
from verl_multiturn.records.write.run_file import path_of
from verl_multiturn.rows.files import row_digest

LATE = [(0, 0), (0, 1), (1, 0), (1, 1)]


def shown(folder: Path) -> list[int]:
    return [row.number for row in read_results(folder).shown]


def test_a_whole_evaluation(tmp_path: Path) -> None:
    made = read_results(write_evaluation(tmp_path, {0: [1.0, 0.0], 7: [0.25, 1.0]}, accs={(7, 0): 0.0}))
    assert [(row.number, row.data_source, row.score, row.right, row.rate) for row in made.rows] == [
        (0, "sums", 0.5, 1, 0.5),
        (7, "sums", 0.625, 1, 0.5),
    ]
    assert made.rows[1].digest == row_digest(data_row(7))
    assert made.shown == made.rows
    assert (made.whole, made.is_over, made.faults) == (2, True, ())
    sample = made.rows[0].samples[1]
    assert (sample.request_id, sample.number, sample.state, sample.right) == ("0-1-9f3c2a", 1, "scored", False)

    assert (sample.calls, sample.tokens, sample.seconds) == (1, 7, 3.0)
    assert made.evaluation.model.hash == "1dd3c9151dcf78eb"


def test_what_is_invalid_or_failed_makes_a_row_not_whole(tmp_path: Path) -> None:
    made = read_results(write_evaluation(tmp_path, {0: [1.0, INVALID], 1: [FAILED, 1.0], 2: [0.0, 1.0]}))
    assert [made.count(state) for state in ("scored", "invalid", "failed")] == [4, 1, 1]
    assert (made.whole, made.is_over) == (1, True)
    assert [row.number for row in made.shown] == [2]
    assert [row.rate for row in made.rows] == [1.0, 1.0, 0.5]


def test_a_reward_of_a_conversation_that_is_invalid_does_not_count(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path, {0: [1.0, INVALID]})
    assert [sample.score for sample in read_results(folder).rows[0].samples] == [1.0, None]


def test_what_has_a_reward_that_is_no_number_is_asked_again(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path, {0: [1.0, float("nan"), float("inf"), 0.0]})
    assert ended_in(folder / "records") == {SampleId(0, 0): 1.0, SampleId(0, 3): 0.0}


def test_a_conversation_of_several_rows_has_a_reward_if_each_row_has_one(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path, {0: [1.0, 1.0]})
    rows = [
        joins.JoinedRow(f"0-{number}-9f3c2a", "0", number, row, validation=True, step=0, score=score)
        for number, scores in enumerate([(0.0, float("nan")), (0.25, 0.5)])
        for row, score in enumerate(scores)
    ]
    joins.write(folder / "records", joins.name_of(True, 0, START), joins.table_of(rows))
    assert [sample.score for sample in read_results(folder).rows[0].samples] == [None, 0.75]
    assert ended_in(folder / "records") == {SampleId(0, 1): 0.75}


@pytest.mark.parametrize(
    ("column", "values", "scores"),
    [
        ("score", ["1.0", "x"], [None, None]),
        ("uid", ["a", "0"], [1.0, 0.0]),
        ("parts", ["[" * 100_000, "{}"], [1.0, 0.0]),
    ],
)
def test_a_join_of_a_stranger(tmp_path: Path, column: str, values: list[str], scores: list[float | None]) -> None:
    folder = write_evaluation(tmp_path, {0: [1.0, 0.0]})
    [path] = (folder / "records" / "join").iterdir()
    table = pq.read_table(path, partitioning=None)
    changed = table.set_column(table.column_names.index(column), column, pa.array(values))
    pq.write_table(pa.concat_tables([changed, changed]), path)  # each row twice
    assert [sample.score for sample in read_results(folder).rows[0].samples] == scores
    assert ended_in(folder / "records") == (
        {} if column == "score" else {SampleId(0, 1): 0.0, **({SampleId(0, 0): 1.0} if column == "parts" else {})}
    )


def test_a_record_that_cannot_be_read_any_more_is_asked_again(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path, {0: [1.0, 0.0]})
    [packed] = (folder / "records").glob("*.jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-30] + b"?" * 30)
    unread = [sample for row in read_results(folder).rows for sample in row.samples]
    assert len(ended_in(folder / "records")) == len(unread) < 2


def test_rows_behind_one_that_is_not_whole_are_not_shown(tmp_path: Path) -> None:
    # Each row had its time: the rest of row 2 is late.
    times = {(row, sample): (10.0 * row, 3.0) for row in range(5) for sample in range(2)}
    times |= {(2, 1): (95.0, 0.0), (4, 0): (96.0, 3.0)}
    samples = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, OPEN], 3: [1.0, 1.0], 4: [1.0, OPEN]}
    made = read_results(write_evaluation(tmp_path, samples, asked=8, times=times))
    assert (made.whole, made.is_over) == (3, False)
    assert [row.number for row in made.shown] == [0, 1]


def test_rows_that_are_there_because_they_were_short_are_not_shown(tmp_path: Path) -> None:
    # All begin at once. The longest took 50 s and the last line was written at 60 s: row 2, which began at 20 s, is
    # whole because it took 5 s; another of its kind might not be there.
    times = {(0, 0): (0.0, 50.0), (1, 0): (5.0, 5.0), (2, 0): (20.0, 5.0), (3, 0): (60.0, 0.0)}
    assert shown(write_evaluation(tmp_path, {0: [1.0], 1: [0.0], 2: [0.0], 3: [OPEN]}, times=times)) == [0, 1]


def test_the_time_that_an_open_conversation_has_taken_counts(tmp_path: Path) -> None:
    # Row 0 is open for 60 s: of none of the others is known that it had its time.
    times = {(0, 0): (0.0, 0.0), (1, 0): (5.0, 5.0), (2, 0): (55.0, 5.0)}
    assert shown(write_evaluation(tmp_path, {0: [OPEN], 1: [0.0], 2: [0.0]}, times=times)) == []


def test_an_evaluation_that_went_on_is_one(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {0: [1.0, INVALID], 1: [0.0, OPEN]})
    write_evaluation(tmp_path, {0: [1.0, 0.0], 1: [1.0, 1.0]}, start=LATER, times=dict.fromkeys(LATE, (99.0, 1.0)))
    made = read_results(tmp_path)
    # The old conversation keeps its place: a second try chooses nothing.
    ids = [[sample.request_id for sample in row.samples] for row in made.rows]
    assert ids == [["0-0-9f3c2a", "0-1-aaaaaa"], ["1-0-9f3c2a", "1-1-aaaaaa"]]
    assert [row.score for row in made.rows] == [0.5, 0.5]
    assert (made.is_over, [row.number for row in made.shown], made.faults) == (True, [0, 1], ())


def test_a_conversation_that_was_joined_again_has_its_last_reward(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {0: [1.0]})
    write_evaluation(tmp_path, {1: [1.0]}, start=LATER, asked=2)
    (record,) = [path for path in (tmp_path / "records" / "join").iterdir() if LATER not in path.name]
    last = f"{LATER[:-6]}zzzzzz"
    record.rename(record.with_name(f"validation-000000-{last}.parquet"))
    path_of(tmp_path / "records", last).write_text(json.dumps(sample_run_file(start=last)))
    assert [row.score for row in read_results(tmp_path).rows] == [1.0, 1.0]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no evaluation\.json; name the folder"):
        read_results(tmp_path)
    for torn in ("{", "[" * 100_000):
        (tmp_path / "evaluation.json").write_text(torn)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_results(tmp_path)
        with pytest.raises(ConfigError, match="cannot be read"):
            begin(tmp_path, {})
    (tmp_path / "evaluation.json").write_text(json.dumps({"recipe": "a"}))
    with pytest.raises(ConfigError, match="model"):
        read_results(tmp_path)


@pytest.mark.parametrize(("samples", "said"), [(2, "record '0-2-9f3c2a' in .* is sample 2, and each"), (0, "samples")])
def test_samples_that_were_not_asked_for_are_refused(tmp_path: Path, samples: int, said: str) -> None:
    path = write_evaluation(tmp_path, {0: [1.0, 1.0, 1.0], 1: [1.0]}) / "evaluation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "samples": samples}))
    with pytest.raises(ConfigError, match=said):
        read_results(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {0: [1.0]})
    write_evaluation(tmp_path, {1: [1.0]}, start=LATER, model=OTHER, asked=2)
    with pytest.raises(
        ConfigError, match=r"is of the model '1dd3c9151dcf78eb', and the evaluation of '5c66446dffffffff'"
    ):
        read_results(tmp_path)


def test_rows_that_changed_between_two_starts_are_refused(tmp_path: Path) -> None:
    write_evaluation(tmp_path, {0: [1.0]})
    write_evaluation(tmp_path, {0: [1.0]}, start=LATER, rows=[data_row(5)])
    with pytest.raises(ConfigError, match="the rows changed meanwhile"):
        read_results(tmp_path)
