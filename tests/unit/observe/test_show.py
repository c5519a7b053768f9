"""`verl-multiturn show`: its output on a run, and that no text of a model reaches the terminal as it is."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.sample_records import BEGAN, START, sample_record, sample_run, sample_run_file, sample_session
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import Point, add_point
from verl_multiturn.observe.show.documents import ShowDocuments, summed
from verl_multiturn.observe.show.terminal import as_json, clean, print_document
from verl_multiturn.records.read.joins import JoinedRow, name_of, table_of, write
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.schema import ConversationLine
from verl_multiturn.records.write.records import RecordWriter

EVIL = "</script>\x1b[2J\x07\x9b31m\x00\u202egnp\u2066[red]x[/red]\u200b:smile:\ud83d\U000e0041\x7f"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sample_run(tmp_path / "records", steps=2, groups=2, size=4)
    return tmp_path


def printed(document: dict[str, Any], width: int = 160) -> str:
    file = StringIO()
    print_document(document, Console(width=width, file=file))
    return file.getvalue()


def shown(folder: Path) -> ShowDocuments:
    return ShowDocuments(folder)


def test_a_run(folder: Path) -> None:
    document = shown(folder).run()
    assert [(line["event"], line["step"], line["conversations"]) for line in document["steps"]] == [
        ("step", 1, 8), ("step", 2, 8), ("validation", 2, 2)
    ]  # fmt: skip
    assert document["fates"] == {
        "training": {"trained": 16, "cut": 1, "raised": 1}, "validation": {"validated": 2}
    }  # fmt: skip
    first = document["steps"][0]
    assert (first["score"], first["groups"], first["equal_groups"], first["trained_tokens"]) == (0.25, 2, 0, 56)
    text = printed(document)
    assert f"start {START} on host-0, 2026-09-21 14:13:20 UTC, no line says that it ended" in text
    document["starts"][0]["is_evaluation"] = True
    assert f"start {START} on host-0, 2026-09-21 14:13:20 UTC, an evaluation\n" in printed(document)
    assert "training: 18 conversations began: trained 16, cut 1, raised 1" in text


def test_evaluated_checkpoints_stand_beside_the_steps(folder: Path) -> None:
    assert shown(folder).run()["evaluations"] == []
    (folder / "evaluations").mkdir()
    add_point(folder, Point(step=1, state="skipped", why="step 2 was there before its turn came"))
    add_point(folder, Point(step=2, state="evaluated", avg=0.75, interval=(0.5, 0.875), rows=16, samples=4))
    document = shown(folder).run()
    assert [(point["step"], point["avg"]) for point in document["evaluations"]] == [(1, None), (2, 0.75)]
    lines = printed(document).splitlines()
    assert any(line.split()[:6] == ["2", "0.75", "0.5", "0.875", "16", "4"] for line in lines)
    assert any(line.rstrip().endswith("skipped: step 2 was there before its turn came") for line in lines)


def test_a_step(folder: Path) -> None:
    document = shown(folder).step(2)
    step, validation = document["parts"]
    assert (step["event"], step["conversations"], step["metrics"]) == ("step", 8, {"critic/score/mean": 0.25})
    assert [group["scores"] for group in step["groups"]] == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert (validation["event"], validation["conversations"]) == ("validation", 2)
    assert document["begun"] == {"count": 12, "fates": {"trained": 8, "validated": 2, "cut": 1, "raised": 1}}
    assert "8 conversations in 8 rows, score 0.25, 56 tokens trained" in printed(document)
    with pytest.raises(ConfigError, match="--step 9: nothing is known of this step; there are 1 to 2"):
        shown(folder).step(9)


def test_a_call_that_could_not_be_read_is_shown_as_the_model_wrote_it(tmp_path: Path) -> None:
    record = sample_record()
    text = '{"name": "calculator", "arguments": {"expression": [red]5' + "\x1b[2J" + "9" * 3_000
    record["calls"][0] |= {"tool": "", "name": "", "arguments": text, "status": "malformed"}
    record["messages"][1]["tool_calls"][0]["function"] = {"name": "error", "arguments": {}}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    lines = printed(shown(tmp_path).conversation(record["request_id"]), width=5_000)
    assert '→ a call that could not be read: {"name": "calculator", "arg' in lines
    assert '{"expression": [red]5\\x1b[2J99' in lines
    assert "more characters; --json has all" in lines
    assert "error(" not in lines


def test_a_group(folder: Path) -> None:
    document = shown(folder).group(f"{START}-t1-0")
    assert [each["score"] for each in document["conversations"]] == [1.0, 0.0, 0.0, 0.0]
    assert (document["step"], document["mean"], document["std"]) == (1, 0.25, 0.5)
    first = document["conversations"][0]
    assert (first["fate"], first["fate_step"], first["advantage"], first["parts"]) == ("trained", 1, 1.5, {"acc": 1.0})
    assert "trained in step 1" in printed(document)
    # The beginning of a uid is enough, where it is one's alone.
    assert shown(folder).group(f"{START}-t1-1")["uid"] == f"{START}-t1-1"
    with pytest.raises(ConfigError, match=r"--group .*: 4 ids begin so, such as "):
        shown(folder).group(f"{START}-t")


def test_a_conversation(folder: Path) -> None:
    document = shown(folder).conversation(f"{START}-t1-0-0")
    assert document["record"]["sample"]["ground_truth"] == "839"
    assert document["joined"][0]["advantages"] == [1.5] * 7
    text = printed(document)
    for part in (
        "group 20261126T101500-5f3a-t1-0, number 0, training, begun in step 1: trained in step 1",
        "row 0: score 1 (acc 1); group mean 0.25, std 0.5; advantage 1.5; 7 of 7 sampled tokens trained",
        "ended: finished, after 3.00 s (generate 2.00 s, tools 0.50 s, interaction 0.00 s)",
        '→ calculator({"expression": "547 + 292"})',
        "Answer: 839",
    ):
        assert part in text


def reply(turn: int | None, text: str, **changes: Any) -> dict[str, Any]:
    entries = {"images": [], "reward": None, "done": False, "truncated": False, "state": None, "metrics": {}}
    return {"turn": turn, "text": text, **entries, "shows": [], "at": BEGAN, **changes}


def test_the_replies_of_an_interaction(tmp_path: Path) -> None:
    sample = {**sample_record()["sample"], "interaction": "quiz", "interaction_kwargs": {"number": 7}}
    replies = [reply(None, "Guess."), reply(0, "No.", reward=-0.5), reply(1, "Yes!" + "x" * 200, reward=1.0, done=True)]
    record = sample_record(sample=sample, replies=replies, score=0.25)
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    text = printed(shown(tmp_path).conversation("r-0"))
    assert 'interaction: quiz, kwargs {"number": 7}, score 0.25\n' in text
    assert "── user, not shown to the model\nYes!" + "x" * 200 in text  # a reward function reads it
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in ("turn reward end text", "opening Guess.", "0 -0.5 No."):
        assert line in lines
    assert any(line.startswith("1 1 done Yes!xxx") for line in lines)
    assert "interaction:" not in printed({**shown(tmp_path).conversation("r-0"), "record": sample_record()})


def test_the_last_reply_before_a_limit_is_shown(tmp_path: Path) -> None:
    record = sample_record(replies=[reply(0, "Go on."), reply(1, "And then?")], scores={"assistant": 1.0, "user": 0.0})
    record["sample"]["interaction"] = "quiz"
    document = {"kind": "conversation", "request_id": "r", "joined": [], "record": record, "faults": []}
    fate = {"uid": "g", "number": 0, "validation": False, "begun": 1, "fate": "trained", "partly": False}
    text = printed({**document, "fate": {**fate, "fate_step": 1, "undone": False, "why": None}})
    assert "score assistant 1, user 0\n" in text
    assert "── user, not shown to the model\nAnd then?\n" in text


def test_a_conversation_without_a_record(folder: Path) -> None:
    document = shown(folder).conversation(f"{START}-raised")
    assert document["record"] is None
    text = printed(document)
    assert "raised: ConfigError: no such tool" in text
    assert "there is no record of it" in text


def test_no_such_conversation(folder: Path) -> None:
    with pytest.raises(ConfigError, match="REQUEST 'nothing': there is no such conversation among 20"):
        shown(folder).conversation("nothing")


def test_joins_alone(folder: Path) -> None:
    for path in (folder / "records").glob("*.jsonl*"):
        path.unlink()
    document = shown(folder).run()
    assert document["fates"] == {"training": {"trained": 16}, "validation": {"validated": 2}}
    assert [(line["step"], line["conversations"], line["began"]) for line in document["steps"]] == [
        (1, 8, None), (2, 8, None), (2, 2, None)
    ]  # fmt: skip
    assert "steps.jsonl is missing" in printed(document)
    assert printed(shown(folder).conversation(f"{START}-t1-0-0"))
    assert printed(shown(folder).step(1))


def test_records_alone(folder: Path) -> None:
    shutil.rmtree(folder / "records" / "join")
    (folder / "records" / "steps.jsonl").unlink()
    document = shown(folder).run()
    assert document["fates"]["training"] == {"cut": 1, "raised": 1, "unknown": 16}
    assert "unknown: no join is there" in printed(shown(folder).conversation(f"{START}-t1-0-0"))
    assert printed(shown(folder).group(f"{START}-t1-0"))


def test_a_step_that_was_done_again_counts_as_it_was_last(folder: Path) -> None:
    again = "20991126T101500_ffffff"
    row = JoinedRow("again", "new", 0, 0, False, 2, score=0.5, trained=2)
    write(folder / "records", name_of(False, 2, again), table_of([row]))
    line = {"event": "step", "start": again, "step": 2, "began": BEGAN, "ended": BEGAN, "phases": {}, "rows": 1}
    with (folder / "records" / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**line, "join": name_of(False, 2, again), "metrics": {}}) + "\n")
    document = shown(folder).step(2)
    assert (document["parts"][0]["start"], document["parts"][0]["score"]) == (again, 0.5)
    assert shown(folder).conversation(f"{START}-t2-0-0")["fate"]["undone"]
    assert "(undone by a later start)" in printed(shown(folder).conversation(f"{START}-t2-0-0"))
    run = shown(folder).run()
    assert run["fates"]["training"] == {"trained": 9, "undone": 8, "cut": 1, "raised": 1}
    assert run["faults"] == []  # a resume is ordinary


def test_an_evaluation_that_went_on_has_the_rows_of_all_its_starts(tmp_path: Path) -> None:
    for number, start in enumerate(("20991126T101500_eeeeee", "20991126T101500_ffffff")):
        made = sample_run_file(start=start, settings={"evaluation": {"samples": 2}})
        (tmp_path / f"run-{start}.json").write_text(json.dumps(made))
        row = JoinedRow(f"0-{number}-{start[-6:]}", "0", number, 0, True, 0, score=float(number))
        write(tmp_path, name_of(True, 0, start), table_of([row]))
    (line,) = shown(tmp_path).run()["steps"]
    assert (line["conversations"], line["score"]) == (2, 0.5)


def test_nothing_that_a_model_wrote_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    calls = [{**sample_record()["calls"][0], "text": EVIL, "name": EVIL, "tool": EVIL, "arguments": {EVIL: EVIL}}]
    messages = [
        {"role": EVIL, "content": EVIL, "name": EVIL},
        {"role": "user", "content": [{"type": "text", "text": EVIL}, {"type": EVIL}, EVIL]},
        {
            "role": "assistant",
            "content": EVIL * 1000,
            "tool_calls": [{"function": {"name": EVIL, "arguments": EVIL}}, 5],
        },
    ]
    sample = {**sample_record()["sample"], "data_source": EVIL, "index": EVIL, "ground_truth": {EVIL: EVIL}}
    sample |= {"interaction": EVIL, "interaction_kwargs": {EVIL: EVIL}}
    record = sample_record(calls=calls, messages=messages, sample=sample, uid=EVIL, error=EVIL, stop_reason=EVIL)
    record |= {"replies": [reply(0, EVIL), reply(1, EVIL, done=True)], "scores": {EVIL: 1.0}}
    writer = RecordWriter(tmp_path, START)
    line = {name: record[name] for name in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
    writer.begin(line)
    writer.keep(lambda: record, line)
    writer.raised({**line, "request_id": "x", "why": EVIL})
    writer.close()
    row = JoinedRow(record["request_id"], "u", 0, 0, False, 1, parts=json.dumps({EVIL: float("nan")}), untrained="void")
    write(tmp_path, name_of(False, 1, START), table_of([row]))
    found = shown(tmp_path)
    documents = [
        found.run(),
        found.step(1),
        found.group(found.conversation("r-0")["fate"]["uid"]),
        found.conversation("r-0"),
    ]
    documents.append(found.conversation("x"))
    for document in documents:
        for width in (40, 160):
            text = printed(document, width)
            assert all(letter.isprintable() or letter == "\n" for letter in text)
        for text in (as_json(document),):
            assert text.isascii()
            assert text.isprintable()
            json.loads(text)
    text = printed(documents[3])
    assert "\\x1b[2J" in text
    assert "\\u202e" in text
    assert "[red]x[/red]" in text
    assert ":smile:" in text


def test_a_long_text_is_shortened() -> None:
    assert clean("a" * 5_000_000) == "a" * 2000 + "… (4,998,000 more characters; --json has all)"
    assert clean("é\t\n😀") == "é\t\n😀"
    assert clean(EVIL[9:23]) == "\\x1b[2J\\x07\\x9b31m\\x00\\u202egnp"


def test_a_session(tmp_path: Path) -> None:
    record = sample_session()
    writer = RecordWriter(tmp_path, START)
    line = {name: record[name] for name in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
    writer.keep(lambda: record, line)
    writer.close()
    assert "two" in printed(shown(tmp_path).conversation("s-0"))


def test_the_command(folder: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["show", str(folder), *words])

    assert run().exit_code == 0
    for words in (["--step", "1"], ["--group", f"{START}-t1-0"], [f"{START}-t1-0-0"], []):
        plain, for_programs = run(*words), run(*words, "--json")
        assert (plain.exit_code, for_programs.exit_code) == (0, 0)
        document = json.loads(for_programs.stdout)
        assert document["faults"] == []
        assert json.loads(plain.stdout.splitlines()[-1]) == summed(document)
    for words in (["--step", "1", "--group", "u"], ["nothing"], ["--step", "77"]):
        refused = run(*words)
        assert refused.exit_code == 2
        assert refused.stdout == ""
    assert CliRunner().invoke(app, ["show", str(folder / "none")]).exit_code == 2


def test_the_last_line_counts_what_is_shown(folder: Path) -> None:
    documents = [shown(folder).run(), shown(folder).step(1), shown(folder).group(f"{START}-t1-0")]
    documents.append(shown(folder).conversation(f"{START}-t1-0-0"))
    assert [summed(document) for document in documents] == [
        {"kind": "run", "conversations": 20, "faults": 0},
        {"kind": "step", "conversations": 8, "faults": 0},
        {"kind": "group", "conversations": 4, "faults": 0},
        {"kind": "conversation", "conversations": 1, "faults": 0},
    ]


def test_one_file_is_shown_with_its_lines(folder: Path) -> None:
    (path,) = (folder / "records").glob("*.jsonl.gz")
    document = shown(path).run()
    assert sum(sum(counted.values()) for counted in document["fates"].values()) == 20
    assert [start["start"] for start in document["starts"]] == [START]
    assert document["steps"] == []


def test_a_validation_comes_after_the_step_of_its_number(folder: Path) -> None:
    path = folder / "records" / "steps.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert [(line["event"], line["step"]) for line in shown(folder).run()["steps"]] == [
        ("step", 1),
        ("step", 2),
        ("validation", 2),
    ]


def test_rows_that_stand_twice_in_a_join_count_once(folder: Path) -> None:
    before = [shown(folder).run(), shown(folder).step(1), shown(folder).conversation(f"{START}-t1-0-0")]
    (path,) = (folder / "records" / "join").glob("step-000001-*")
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table]), path)
    assert [shown(folder).run(), shown(folder).step(1), shown(folder).conversation(f"{START}-t1-0-0")] == before


@pytest.mark.parametrize("command", ["show", "explain", "view"])
@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl.gz", b"no gzip"), ("a.jsonl", b"no json\n"), ("a.jsonl", b"{}\n")]
)
def test_a_file_of_which_nothing_can_be_read_is_refused(tmp_path: Path, command: str, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    refused = CliRunner().invoke(app, [command, str(tmp_path / name)])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"verl-multiturn: {tmp_path / name}, offset 0: ")


def test_an_empty_file_is_that_of_a_process_which_was_killed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").touch()
    assert CliRunner().invoke(app, ["show", str(tmp_path / "a.jsonl.gz")]).exit_code == 0


@pytest.mark.parametrize("words", [["show"], ["explain"], ["convert", "--otel"], ["view"]])
def test_a_folder_without_records_is_refused(tmp_path: Path, words: list[str]) -> None:
    refused = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"verl-multiturn: {str(tmp_path)!r} holds no records; name a run's folder or its record_dir\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.lines.jsonl", "steps.jsonl", "run-a.json", "join/step-000001-a.parquet"]
)
def test_a_folder_with_any_part_of_a_run_is_shown(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert Records(tmp_path).require().folders == [tmp_path]


def test_the_verdict_of_each_criterion_is_shown(tmp_path: Path) -> None:
    record = sample_record()
    writer = RecordWriter(tmp_path, START)
    line = {name: record[name] for name in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
    verdicts = {"solved": 0.5, "kind": {"1": 1.0, "2": 0.0}}
    writer.begin(line)
    writer.keep(lambda: record, line)
    writer.scored({**line, "score": 0.75, "verdicts": verdicts})
    writer.close()
    parts = json.dumps({"compute_score": 0.75, "verdicts": verdicts})
    row = JoinedRow(record["request_id"], "u", 0, 0, False, 1, score=0.75, parts=parts)
    write(tmp_path, name_of(False, 1, START), table_of([row]))
    document = shown(tmp_path).conversation(record["request_id"])
    text = " ".join(printed(document, 300).split())
    assert "(compute_score 0.75, verdicts/solved 0.5, verdicts/kind/1 1, verdicts/kind/2 0)" in text
    assert document["joined"][0]["parts"]["verdicts"] == verdicts
    (scored,) = [each for each in Records(tmp_path).lines() if each["event"] == "score"]
    assert scored["verdicts"] == verdicts
    scored.pop("file")  # the reader adds it
    assert ConversationLine.model_validate(scored).verdicts == verdicts
