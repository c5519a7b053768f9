"""One set of conversations, written as a training run and as an evaluation: every reader gives the same answers.

What did each conversation earn, who solved its task, and which groups have a signal?
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.support.evaluation_samples import LATER, START, data_row, write_evaluation
from tests.support.sample_records import BEGAN, sample_record, sample_run_file
from verl_multiturn.cli.main import app
from verl_multiturn.evaluation.compare import compare
from verl_multiturn.evaluation.endings import ended_in
from verl_multiturn.evaluation.plan import SampleId
from verl_multiturn.evaluation.probe import probe
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.observe.convert.parquet import write_parquet
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.explain.facts import read_facts
from verl_multiturn.observe.explain.groups import groups_of
from verl_multiturn.observe.metrics import aggregate
from verl_multiturn.observe.pass_at_k import passed_shares
from verl_multiturn.observe.show.documents import ShowDocuments
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.fates import fates_of
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import path_of
from verl_multiturn.rows.reward_numbers import ScoreRange


class Played(NamedTuple):
    """A conversation of the set."""

    rows: tuple[float, ...]
    """Score of each of its rows in the join."""
    acc: float | None = None
    cause: str | None = None
    """Why its score has no meaning: `invalid`, or `unjudged`."""


CONVERSATIONS = [
    [Played((0.0, 1.0)), Played((0.5, 0.5))],  # verl's score lies on the last row; here rewards of turns on both
    [Played((0.30000001192092896,)), Played((0.3,))],  # 0.3 as float32, and as it was
    [Played((0.9,)), Played((0.9,))],
    [Played((0.0,)), Played((0.75,), cause="invalid")],
    [Played((0.9,)), Played((0.0,), cause="unjudged")],
    [Played((0.2,), acc=1.0), Played((0.2,), acc=1.0)],
    [Played((0.8,), acc=0.0), Played((0.8,), acc=0.0)],
    [Played((0.0,)), Played((1.0,))],
]
"""Two conversations of each of eight data rows, of which rewards go from 0 to 1."""
SCORES = {
    (row, number): None if each.cause else sum(each.rows)
    for row, group in enumerate(CONVERSATIONS)
    for number, each in enumerate(group)
}
RIGHT = {(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (5, 0), (5, 1), (7, 1)}
EQUAL, ALL_RIGHT, COMPARED = {0, 1, 2, 5, 6}, {0, 2, 5}, 6
MEAN = sum(score for score in SCORES.values() if score is not None) / 14
BEFORE = f"{START[:-6]}000000"
"""A start that did the step before, and was killed."""


def causes(unjudged: str) -> dict[str | None, str | None]:
    return {None: None, "invalid": "invalid", "unjudged": unjudged}


def rows_of(request_id: str, uid: str, number: int, each: Played, validation: bool, unjudged: str) -> list[JoinedRow]:
    """Return the join's data on a conversation, at the step 1, or 0 of an evaluation."""
    parts = json.dumps({} if each.acc is None else {"acc": each.acc})
    step, cause = int(not validation), causes(unjudged)[each.cause]
    return [
        JoinedRow(request_id, uid, number, row, validation, step, score=score, parts=parts, untrained=cause)
        for row, score in enumerate(each.rows)
    ]


def write_training(folder: Path, start: str = START, name: str = "row", scores: float | None = None) -> Path:
    """Write the step 1 of a training run; with `scores` each conversation earned the same."""
    writer = RecordWriter(folder, start)
    path_of(folder, start).write_text(json.dumps(sample_run_file(start=start, resumed_from=0)))
    joined = []
    for row, group in enumerate(CONVERSATIONS):
        for number, each in enumerate(group):
            played = each if scores is None else Played((scores,))
            record = sample_record(
                request_id=f"{name}-{row}-{number}",
                uid=f"{name}-{row}",
                number=number,
                valid=played.cause != "invalid",
            )
            record["rows"] *= len(played.rows)
            line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
            writer.begin({**line, "at": BEGAN})
            writer.keep(lambda record=record: record, {**line, "at": BEGAN + 3.0})  # type: ignore[misc]
            writer.scored({**line, "at": BEGAN + 3.1, "score": sum(played.rows)})
            joined += rows_of(record["request_id"], record["uid"], number, played, False, "reward_outage")
    writer.close()
    join = joins.name_of(False, 1, start)
    joins.write(folder, join, joins.table_of(joined))
    line = {"event": "step", "start": start, "step": 1, "began": BEGAN, "ended": BEGAN + 9, "phases": {}, "metrics": {}}
    line |= {"join": join, "rows": len(joined), "evicted": [], "filtered": [], "failed": [], "rerolled": {}}
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Write the run: its step was done by a start that was killed, and again."""
    folder = tmp_path / "run" / "records"
    write_training(folder, BEFORE, name="before", scores=0.0)
    return write_training(folder)


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Write the evaluation: of row 7 one conversation was invalid, and another start repeated it."""
    folder = tmp_path / "evaluation"
    given = {
        row: [{"invalid": "invalid", "unjudged": "failed"}.get(str(each.cause), 0.0) for each in group]
        for row, group in enumerate(CONVERSATIONS)
    }
    write_evaluation(folder, given | {7: ["invalid", 0.0]})  # type: ignore[dict-item]
    said = (folder / "evaluation.json").read_text()
    write_evaluation(folder, {7: [0.0]}, start=LATER)
    (folder / "evaluation.json").write_text(said)
    first, later = [], []
    for row, group in enumerate(CONVERSATIONS):
        for number, each in enumerate(group):
            again = (row, number) == (7, 0)
            for start, made in ((START, first), (LATER, later)):
                if start == START or again:
                    own = Played((0.5,), cause="invalid") if again and start == START else each
                    made += rows_of(f"{row}-{number}-{start[-6:]}", str(row), number, own, True, "failed")
    for start, made in ((START, first), (LATER, later)):
        joins.write(folder / "records", joins.name_of(True, 0, start), joins.table_of(made))
    return folder


Answers = tuple[dict[tuple[int, int], float | None], set[tuple[int, int]] | None]
"""The reward of each conversation, and who is right; None: unknown to the reader."""


def place(uid: str, number: int) -> tuple[int, int]:
    return int(uid.removeprefix("row-")), number


def is_one(request_id: str) -> bool:
    """Return whether a conversation is one of the set, and not one that was done again."""
    return not request_id.startswith("before") and request_id != f"7-0-{START[-6:]}"


def by_show(folder: Path) -> Answers:
    shown = ShowDocuments(folder)
    groups = [shown.group(uid) for uid in {fate.uid for fate in fates_of(Records(folder))}]
    members = [each for group in groups for each in group["conversations"] if is_one(each["request_id"])]
    return {place(each["uid"], each["number"]): each["score"] for each in members}, None


def by_view(folder: Path) -> Answers:
    documents = Documents([folder])
    documents.refresh()
    rows = documents.page("", "began", False, 0, 100)["rows"]
    return {place(row["uid"], row["number"]): row["score"] for row in rows if is_one(row["request_id"])}, None


def by_explain(folder: Path) -> Answers:
    talks = [talk for talk in read_facts(Records(folder)).played if is_one(talk.request_id)]
    numbers = {
        talk.request_id: int(talk.request_id.split("-")[-1 if "row" in talk.request_id else 1]) for talk in talks
    }
    places = {talk.request_id: place(talk.uid, numbers[talk.request_id]) for talk in talks}
    return {places[talk.request_id]: talk.score for talk in talks}, {
        places[talk.request_id] for talk in talks if talk.right
    }


def by_convert(folder: Path) -> Answers:
    write_parquet(RunSource(Records(folder)), folder / "converted")
    rows = [row for row in pq.read_table(folder / "converted").to_pylist() if is_one(row["transcript_id"])]
    places = {row["transcript_id"]: place(row["uid"], row["task_repeat"]) for row in rows}
    assert all(row["success"] is None for row in rows if row["score_value"] is None)
    return {places[row["transcript_id"]]: row["score_value"] for row in rows}, {
        places[row["transcript_id"]] for row in rows if row["success"]
    }


READERS = [by_show, by_view, by_explain, by_convert]


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_each_earned_and_who_is_right(
    kind: str, reader: Callable[[Path], Answers], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    scores, right = reader(folder if kind == "training" else folder / "records")
    assert scores == SCORES
    assert right in (None, RIGHT)


def test_the_same_of_an_evaluation_by_its_own_readers(evaluation: Path, tmp_path: Path) -> None:
    results = read_results(evaluation)
    samples = {(row.number, each.number): each for row in results.rows for each in row.samples}
    assert {at: each.score for at, each in samples.items()} == SCORES
    assert {at for at, each in samples.items() if each.right} == RIGHT
    assert ended_in(evaluation / "records") == {
        SampleId(*at): score for at, score in SCORES.items() if score is not None
    }

    found = probe(results)  # of whole rows
    assert (found.right.mean, 1 - found.signal.mean, found.all_right) == (7 / 12, 5 / 6, 3)
    assert (len(EQUAL), len(ALL_RIGHT), COMPARED) == (5, 3, 6)

    compared = compare(results, results)
    assert {(pair.first.number, pair.first.right) for pair in compared.pairs} == {
        (row, sum((row, number) in RIGHT for number in (0, 1))) for row in (0, 1, 2, 5, 6, 7)
    }
    assert compared.flipped == []

    rows, target = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    rows.write_text("".join(json.dumps(data_row(row)) + "\n" for row in range(len(CONVERSATIONS))))
    told = CliRunner().invoke(
        app, ["rows", "keep", str(rows), "--eval", str(evaluation), "--where", "right >= 1", "--to", str(target)]
    )
    assert told.exit_code == 0, told.output
    kept = [json.loads(line)["extra_info"]["index"] for line in target.read_text().splitlines()]
    assert kept == sorted({row for row, _ in RIGHT})


def test_the_groups_of_the_step_that_counts(training: Path) -> None:
    [shown] = [line for line in ShowDocuments(training).run()["steps"] if line["event"] == "step"]
    assert (shown["conversations"], shown["equal_groups"], shown["score"]) == (16, 5, pytest.approx(MEAN))
    groups = ShowDocuments(training).step(1)["parts"][0]["groups"]
    assert {place(group["uid"], 0)[0] for group in groups if group["equal"]} == EQUAL

    documents = Documents([training])
    documents.refresh()
    [step] = documents.run()["dirs"][0]["steps"]
    assert {name: step[name] for name in ("conversations", "compared_groups", "equal_groups", "all_right")} == {
        "conversations": 16, "compared_groups": COMPARED, "equal_groups": len(EQUAL), "all_right": len(ALL_RIGHT),
    }  # fmt: skip
    assert step["score"] == pytest.approx(MEAN)

    facts = read_facts(Records(training))
    found = groups_of([talk for talk in facts.training if talk.score is not None])
    equal = [group for group in found if group.equal]
    assert {place(group.talks[0].uid, 0)[0] for group in equal} == EQUAL
    assert {place(group.talks[0].uid, 0)[0] for group in equal if group.right} == ALL_RIGHT

    stats = [metrics_of(row, each) for row, group in enumerate(CONVERSATIONS) for each in group]
    assert aggregate(stats)["groups_equal"] == len(EQUAL)
    # Rows 3 and 4 have one valid conversation, which is wrong and right.
    assert passed_shares(stats, ScoreRange())["pass@1/prompts"] == 8


def test_what_is_learned_from_has_the_same_rewards(training: Path) -> None:
    found = choose([training], SelectionRule())
    chosen = {place(each.uid, each.number): each.score for each in found.conversations if is_one(each.request_id)}
    # A record of two rows that are the same differs from the engine's output.
    assert chosen == {at: score for at, score in SCORES.items() if score is not None and at[0] != 0}
    assert found.left_out["without a reward"] == 1


def metrics_of(row: int, each: Played) -> dict[str, Any]:
    """Return the statistics of a conversation, as the trainer has them."""
    nothing = dict.fromkeys(("generate_s", "tools_s", "interaction_s"), 0.0)
    return {
        **nothing, "group": f"row-{row}", "valid": each.cause is None, "stop": "finished", "differs": False,
        "calls": [], "assistant_turns": 1, "user_turns": 0, "calc_rewards": {}, "replies": [],
        "reported": {} if each.acc is None else {"acc": each.acc},
        "conversation": {"row": 0, "rows": len(each.rows), "score": sum(each.rows)},
    }  # fmt: skip
