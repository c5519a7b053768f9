"""Results of `verify` on a record whose words were changed: by itself, by its line, by the trainer's join."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.role_samples import write_games
from tests.support.sample_records import sample_record, sample_run, sample_session
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.verify.record import verify_record

INVALID = "it is marked as valid, and ended with outage, with sampled tokens to train"
DONE = {"turn": 1, "text": "over", "reward": 1.0, "done": True}


def found(record: dict[str, Any]) -> list[str]:
    return [each.what for each in verify_record(record).violations]


def cut(record: dict[str, Any], turn: int, finish: str = "length") -> dict[str, Any]:
    changed = copy.deepcopy(record)
    changed["generations"][turn]["finish"] = finish
    return changed


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (sample_record(stop_reason="because"), "its stop_reason is 'because', expected one of ['finished', "),
        (sample_record(stop_reason="outage"), INVALID),
        (sample_record(valid=False), "it is marked as invalid, and ended with finished, with sampled tokens to train"),
        (sample_session(valid=False), "it is marked as invalid, and ended with finished, with sampled tokens to train"),
        (sample_record(stop_reason="turn_length"), "it ended with turn_length, and the budget cut no last turn"),
        (cut(sample_record(), 1), "it ended with finished, though its last turn was cut by the budget"),
        (cut(sample_record(), 0), "generation 0 was cut by its budget, and the conversation went on"),
        (sample_record(stop_reason="environment_done"), "it ended with environment_done, and no last reply says so"),
        (
            sample_record(stop_reason="environment_truncated", replies=[DONE]),
            "it ended with environment_truncated, and no last reply says so",
        ),
        (
            sample_record(calls=[{**sample_record()["calls"][0], "status": "fine"}]),
            "call 0 has the status 'fine', expected one of ['ok', ",
        ),
    ],
)
def test_words_that_do_not_fit_each_other(record: dict[str, Any], said: str) -> None:
    (violation,) = found(record)
    assert violation.startswith(said)


def test_words_that_fit_each_other() -> None:
    for record in (
        sample_record(stop_reason="environment_done", replies=[DONE]),
        sample_record(stop_reason="environment_truncated", replies=[{**DONE, "truncated": True}]),
        cut(sample_record(stop_reason="turn_length"), 1),
        cut(sample_record(stop_reason="response_length"), 1),
        cut(sample_record(stop_reason="wall_clock", time_up="generate"), 1),
        cut(sample_session(), 0),  # an agent may ask again
    ):
        assert found(record) == []


def change(folder: Path, name: str, value: Any) -> None:
    """Change an entry of the first record, and leave its line and its join as they are."""
    (path,) = folder.glob("*.jsonl.gz")
    first, *rest = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    record = json.loads(first)
    record[name] = value(record[name]) if callable(value) else value
    path.write_bytes(gzip.compress(line_of(record) + b"".join(rest)))


def told(folder: Path) -> list[str]:
    return [each.what for verdict in verify_files([folder]) if verdict.verified for each in verdict.verified.violations]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("uid", "other", ["by the line of its end '", "by the trainer's join '"]),
        ("number", 5, ["its number is 5, by the line of its end 0", "its number is 5, by the trainer's join 0"]),
        ("validation", True, ["its validation is True, by the line", "its validation is True, by the trainer's join"]),
        ("step", 9, ["its step is 9, by the line of its end 1"]),
        ("stop_reason", "max_tool_calls", ["its stop_reason is 'max_tool_calls', by the line of its end 'finished'"]),
        ("calls", [], ["its calls is 0, by the line of its end 1"]),
    ],
)
def test_a_changed_record_contradicts_what_lies_beside_it(
    tmp_path: Path, name: str, value: Any, said: list[str]
) -> None:
    sample_run(tmp_path, steps=1, groups=1, size=2)
    assert told(tmp_path) == []
    change(tmp_path, name, value)
    violations = told(tmp_path)
    assert len(violations) == len(said)
    assert all(part in violation for part, violation in zip(said, violations, strict=True))


def rewrite_join(folder: Path, name: str, value: Any) -> None:
    (path,) = (folder / "join").glob("step-*")
    table = pq.read_table(path, partitioning=None)
    values = [value, *table[name].to_pylist()[1:]]
    at = table.schema.get_field_index(name)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.types[at])), path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("row", 1, "the trainer's join has its row 1; it has 1 rows"),
        ("advantages", [1.0] * 6, "row 0 has 7 sampled tokens, by the trainer's join 6"),
        ("untrained", "invalid", "it is marked as valid, and row 0 was left out as invalid"),
        ("untrained", "void", "it is marked as having no void turn, and row 0 was left out for one"),
    ],
)
def test_a_join_of_something_else_is_found(tmp_path: Path, name: str, value: Any, said: str) -> None:
    sample_run(tmp_path, steps=1, groups=1, size=2)
    rewrite_join(tmp_path, name, value)
    assert told(tmp_path) == [said]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("role", "black", ["the role of row 0 is 'white', by the trainer's join 'black'",
                           "its agent gave the role 'black' -1, the trainer's join has 0"]),
        ("role", None, ["the role of row 0 is 'white', by the trainer's join None"]),
        ("score", 0.5, ["its line says that it scored 0.0, the trainer's join -0.5",
                        "its agent gave the role 'white' 1, the trainer's join has 0.5"]),
    ],
)  # fmt: skip
def test_a_join_of_other_roles_or_rewards_is_found(tmp_path: Path, name: str, value: Any, said: list[str]) -> None:
    write_games(tmp_path, {"u": [1.0, -1.0]})
    assert told(tmp_path) == []
    rewrite_join(tmp_path, name, value)
    assert told(tmp_path) == said


def test_rewards_by_role_that_were_swapped_in_a_record_are_found(tmp_path: Path) -> None:
    """Their sum is the same."""
    write_games(tmp_path, {"u": [1.0, -1.0]})
    change(tmp_path, "session", lambda session: {**session, "rewards": {"white": -1.0, "black": 1.0}})
    assert told(tmp_path) == [
        "its agent gave the role 'white' -1, the trainer's join has 1",
        "its agent gave the role 'black' 1, the trainer's join has -1",
    ]


def test_a_score_that_is_not_the_trainers(tmp_path: Path) -> None:
    sample_run(tmp_path, steps=1, groups=1, size=2)
    (path,) = tmp_path.glob("*.lines.jsonl")
    line = {"event": "score", "request_id": "20261126T101500-5f3a-t1-0-1", "at": 1.0, "score": 0.25}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert told(tmp_path) == ["its line says that it scored 0.25, the trainer's join 0.0"]


def test_a_record_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    sample_run(tmp_path, steps=1, groups=1, size=2)
    (path,) = tmp_path.glob("*.jsonl.gz")
    texts = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(texts[:-1])))
    (missing,) = [verdict for verdict in verify_files([tmp_path]) if verdict.verified is None]
    assert missing.problem.startswith("there is no record; by a line one of request '20261126T101500-5f3a-v1-0-0' is")
    assert not missing.is_torn
