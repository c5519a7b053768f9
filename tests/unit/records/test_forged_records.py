"""Records that somebody changed, or files that are none: `verify` ends with a verdict or one sentence."""

import copy
import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.sample_records import sample_record, sample_session
from verl_multiturn.cli import main as cli
from verl_multiturn.errors import CertificateError
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import lines as record_lines
from verl_multiturn.records.read import members
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.folder import verify_file
from verl_multiturn.records.verify.record import verify_record

GOOD = [sample_record(), sample_session()]
LINE = line_of(GOOD[0])
RECEIPT = ("prompt_tokens", "prompt_digest", "max_tokens", "tokens", "digest", "row", "start", "cause")
TOKENS = ("ids", "logprobs", "versions")
ODD = [
    *(None, True, False, 0, 1, -1, 7, 0.5, 1e400, -1e400, float("nan"), 2**31, 2**63, -(2**63), 10**30, 10**400),
    *("", "1", "nan", "\ud800", "\x00", "é", [], [[]], {}, {"a": 1}, [None], ["x"], [[1], [2, 3]], [{}]),
    *([[10**12, 1, 3, 0, 1]], [[2, 3]], "undelivered", [-0.5], [[0, 0, 0, 0, 0]]),
]


def verdict(path: Path) -> str:
    """Return `verified`, `violations` or `torn` of a file of one record; `refused` for a file that is refused."""
    try:
        found = [each.verified for each in verify_file(path)]
    except CertificateError:
        return "refused"
    verdicts = [each for each in found if each is not None]
    if not verdicts:
        return "torn"
    return "violations" if any(each.violations for each in verdicts) else "verified"


def said(record: Any) -> str:
    """Return `verified`, `violations` or `refused` of a record."""
    try:
        return "violations" if verify_record(record).violations else "verified"
    except CertificateError:
        return "refused"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within a JSON value, with each of its keys or indexes."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def changed(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a good record, and the same after one to three changes at random places."""
    good = draw.choice(GOOD)
    record = copy.deepcopy(good)
    for _ in range(draw.randint(1, 3)):
        near = [each for name in ("rows", "generations") for each in places(record.get(name))]
        inside = list(places(record))
        where = draw.choice([near, inside] if near else [inside])
        if not where:
            continue
        holder, key = draw.choice(where)
        if key not in (holder if isinstance(holder, dict) else range(len(holder))):
            continue
        kind = draw.choice(["odd", "drop", "repeat", "other", "wrap"])
        if kind == "odd":
            holder[key] = copy.deepcopy(draw.choice(ODD))
        elif kind == "drop":
            del holder[key]
        elif kind == "repeat" and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif kind == "other":
            holder[key] = copy.deepcopy(draw.choice(list(places(record)))[0])
        else:
            holder[key] = [holder[key]]
    return good, record


def meaning(record: dict[str, Any]) -> Any:
    """Return a record's data on tokens; all sources above 2 are context."""
    rows = [(row["prompt_length"], columns(row)) for row in record["rows"]]
    for _, full in rows:
        full["sources"] = [min(source, 2) for source in full["sources"]]
    generations = [
        json.dumps([generation.get(name) for name in (*RECEIPT, *TOKENS)]) for generation in record["generations"]
    ]
    placed = [
        text for text, each in zip(generations, record["generations"], strict=True) if each.get("row") is not None
    ]
    # One that no row holds may be there twice: the engine may write the same twice.
    return json.dumps([rows, placed, sorted({*generations} - {*placed})])


@given(st.integers(0, 2**32))
def test_no_structural_change_of_a_record_raises_or_passes(seed: int) -> None:
    good, record = changed(random.Random(seed))
    if said(record) == "verified":
        assert meaning(record) == meaning(good)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_changed_record_in_a_file(tmp_path_factory: Any, seed: int) -> None:
    _, record = changed(random.Random(seed))
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    path.write_text(json.dumps(record) + "\n")
    verdict(path)


@pytest.mark.parametrize("good", GOOD, ids=["conversation", "session"])
def test_the_good_records_are_verified(good: dict[str, Any]) -> None:
    assert verify_record(good).violations == []


def every_change() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the good records with one token, mask, version, place, source, prompt or count changed."""
    for good in GOOD:
        for index, row in enumerate(good["rows"]):
            for name, other in (("ids", lambda id: id + 1), ("logprobs", lambda number: number - 0.25)):
                for token, _ in enumerate(row[name]):
                    record = copy.deepcopy(good)
                    values = record["rows"][index][name]
                    values[token] = other(values[token])
                    yield f"{name} {token} of row {index} of {good['request_id']}", record
            for number, run in enumerate(row["runs"]):
                for entry, new in ((0, run[0] + 1), (1, 1 - run[1]), (2, run[2] + 1), (3, run[3] + 1)):
                    record = copy.deepcopy(good)
                    record["rows"][index]["runs"][number][entry] = new
                    yield f"entry {entry} of run {number} of row {index} of {good['request_id']}", record
                record = copy.deepcopy(good)
                record["rows"][index]["runs"][number][4] = 0 if run[4] else 2
                yield f"the source of run {number} of row {index} of {good['request_id']}", record
            record = copy.deepcopy(good)
            record["rows"][index]["prompt_length"] += 1
            yield f"the prompt of row {index} of {good['request_id']}", record
        for number, generation in enumerate(good["generations"]):
            for name, new in (
                ("prompt_tokens", generation["prompt_tokens"] + 1),
                ("prompt_digest", "0" * 32),
                ("max_tokens", generation["max_tokens"] - 1),
                ("tokens", generation["tokens"] - 1),
                ("digest", "0" * 32),
                ("row", 1 - (generation["row"] or 0)),
                ("start", (generation["start"] or 0) + 1),
                ("cause", "too_old"),
                ("parent", number),
            ):
                if generation["cause"] is not None and name == "cause":
                    continue  # a cause is the writer's claim; no token confirms it
                record = copy.deepcopy(good)
                record["generations"][number][name] = new
                yield f"{name} of generation {number} of {good['request_id']}", record
            for name in TOKENS:
                if generation[name] is not None:
                    record = copy.deepcopy(good)
                    values = record["generations"][number][name]
                    values[0] = [values[0][0], values[0][1] + 1] if name == "versions" else values[0] - 1
                    yield f"{name} of generation {number} of {good['request_id']}", record


@pytest.mark.parametrize("record", [pytest.param(record, id=name) for name, record in every_change()])
def test_each_change_is_found(record: dict[str, Any]) -> None:
    assert said(record) != "verified"


def test_generations_in_another_order_or_lost() -> None:
    assert said({**GOOD[0], "generations": GOOD[0]["generations"][::-1]}) != "verified"
    for good in GOOD:
        for lost in range(len(good["generations"])):
            rest = [each for number, each in enumerate(good["generations"]) if number != lost]
            if good["generations"][lost]["row"] is not None:
                assert said({**good, "generations": rest}) != "verified"


def entry(name: str, value: Any) -> bytes:
    return json.dumps({**GOOD[0], name: value}).encode()


def column(name: str, value: Any) -> bytes:
    return entry("rows", [{**GOOD[0]["rows"][0], name: value}])


ROW = GOOD[0]["rows"][0]
DEEP = b"[" * 100_000 + b"]" * 100_000
LINES: dict[str, tuple[bytes, str]] = {
    "a column is an object": (column("ids", {}), "rows.0.ids is {}: input should be a valid array"),
    "a column is null": (column("ids", None), "rows.0.ids is None"),
    "a column is text": (column("ids", "1" * 16), "rows.0.ids is '1111111111111111'"),
    "a column of texts": (column("ids", [str(each) for each in ROW["ids"]]), "rows.0.ids.0 is '1'"),
    "a column of truths": (column("ids", [True] * 16), "rows.0.ids.0 is True"),
    "a column of fractions": (column("ids", [float(each) for each in ROW["ids"]]), "rows.0.ids.0 is 1.0"),
    "a run of four": (column("runs", [[6, 0, -1, 0]]), "rows.0.runs.0"),
    "a run of nothing": (column("runs", [[0, 0, -1, 0, 0], *ROW["runs"]]), "it has a run [0, 0, -1, 0, 0]"),
    "a run without end": (column("runs", [[10**15, 0, -1, 0, 0]]), "expected one id for each token"),
    "a mask of 2": (column("runs", [[16, 2, -1, 0, 0]]), "it has a run [16, 2, -1, 0, 0]"),
    "a version of -2": (column("runs", [[16, 0, -2, 0, 0]]), "it has a run [16, 0, -2, 0, 0]"),
    "an unknown source": (column("runs", [[16, 0, -1, 0, 6]]), "it has a run [16, 0, -1, 0, 6]"),
    "too few logprobs": (column("logprobs", ROW["logprobs"][1:]), "expected one id for each token, and one logprob"),
    "deep nesting": (LINE[:-2] + b', "x": ' + DEEP + b"}", "nested too deeply"),
    "a line that is deep alone": (DEEP, "nested too deeply"),
    "an id beyond 64 bits": (column("ids", [10**30, *ROW["ids"][1:]]), "rows.0.ids.0 is '1000000"),
    "a negative prompt": (column("prompt_length", -1), "it has prompt_length -1, with 16 ids"),
    "a prompt beyond the row": (column("prompt_length", 10**9), "it has prompt_length 1000000000"),
    "an entry of nobody": (entry("mask", [0]), "mask is [0]: extra inputs are not permitted"),
    "a key twice": (LINE[:-2] + b', "uid": "x"}', "has the key 'uid' twice"),
    "a newer schema": (entry("schema", 3), "it is of schema 3, this version reads 2; install"),
    "a schema of text": (entry("schema", "2"), "it is of schema '2'"),
    "no schema": (b'{"request_id": "r"}', "no record of a conversation: it has no entry 'schema', expected 2"),
    "an empty object": (b'{"schema": 2}', "request_id is {'schema': 2}: field required"),
    "a list": (b"[]", "expected a record, a JSON object, got a list"),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("packed", [True, False])
def test_a_line_that_is_no_record_is_named_as_what_it_is(tmp_path: Path, name: str, packed: bool) -> None:
    line, message = LINES[name]
    text = LINE + line + b"\n"
    path = tmp_path / ("forged.jsonl.gz" if packed else "forged.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    told = done.stderr.replace("\n", " ")
    assert f"{path}:{'offset 0:2' if packed else '2'}: " in told
    assert message in told


def member(first: int) -> bytes:
    """Return a member of three records, each of its own conversation."""
    names = [f'"r-{first + number}"'.encode() for number in range(3)]
    return gzip.compress(b"".join(LINE.replace(b'"r-0"', name) for name in names), mtime=0)


MEMBER, SECOND = member(0), member(3)


@pytest.mark.parametrize(
    ("content", "code", "shown"),
    [
        (MEMBER + SECOND, 0, "ok 6 records, 42 sampled tokens, 0 violations\n"),
        (MEMBER + SECOND[:-9], 0, "ok 3 records, 21 sampled tokens, 0 violations, 1 torn\n"),
        (MEMBER[:-9] + SECOND, 1, "error 3 records, 21 sampled tokens, 0 violations, 1 damaged stretches\n"),
        (MEMBER + bytes([MEMBER[0] ^ 1]) + MEMBER[1:] + SECOND, 1, "1 damaged stretches"),
        (MEMBER[:200] + bytes([MEMBER[200] ^ 16]) + MEMBER[201:] + SECOND, 1, "1 damaged stretches"),
        (MEMBER[:-6] + b"\x00" + MEMBER[-5:] + SECOND, 1, "1 damaged stretches"),
        (MEMBER + MEMBER, 1, "error 3 records, 21 sampled tokens, 0 violations, 3 repeated\n"),
        (b"", 2, "holds no record"),
        (b"\x00" * 100_000, 2, "holds no record"),
        (LINE, 2, "holds no record"),
        (gzip.compress(b""), 2, "holds no record"),
        (gzip.compress(b"\xff\xfe" + LINE), 2, "holds no record"),
        (gzip.compress(LINE * 2)[:-9], 2, "holds no record"),
    ],
    ids=range(13),
)
def test_packed_files_of_other_kinds(tmp_path: Path, content: bytes, code: int, shown: str) -> None:
    path = tmp_path / "file.jsonl.gz"
    path.write_bytes(content)
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert (done.exit_code, "Traceback" in done.output) == (code, False), done.output
    assert shown in done.output.replace("\n", " ") + done.output
    if code < 2:
        told = json.loads(done.stdout.splitlines()[-1])
        assert f"{told['records']} records, {told['sampled_tokens']} sampled tokens" in done.output
        assert (told["violations"], told["torn"] + told["damaged"] + told["repeated"]) == (
            0,
            done.output.count("not verified"),
        )


def test_what_has_no_end_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl.gz")
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "pipe.jsonl.gz")])
    assert done.exit_code == 2
    assert "is no plain file" in done.stderr
    monkeypatch.setattr(members, "LONGEST_MEMBER", 10_000)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 1_000_000) + MEMBER)
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "offset 0: not verified: a gzip member of" in done.output
    assert "it holds more than 10000 bytes" in done.output


def test_a_file_of_false_beginnings_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beginning is followed by a stored block that holds the others, so that each is read far."""
    monkeypatch.setattr(members, "_MOST_TRIED", 1 << 20)
    stored = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x00\xff\xff\x00\x00"
    path = tmp_path / "file.jsonl.gz"
    path.write_bytes(stored * 20_000)
    assert verdict(path) == "refused"


@pytest.mark.parametrize("name", [*RECEIPT, *TOKENS, "parent", "finish"])
@pytest.mark.parametrize("value", [{}, [], [[]], None, 10**30, "x", 1.5, [[10**12, 3]]], ids=repr)
def test_generations_of_wrong_types(name: str, value: Any) -> None:
    for good in GOOD:
        for number, _ in enumerate(good["generations"]):
            record = copy.deepcopy(good)
            record["generations"][number][name] = value
            said(record)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "refused"),
        (b"\n\n", "refused"),
        (b"\x00" * 100_000, "refused"),
        (gzip.compress(LINE), "refused"),
        (b"\xef\xbb\xbf" + LINE, "verified"),  # the mark of an editor on Windows
        (LINE[:-1] + b"\r\n", "verified"),
        (LINE.decode().encode("utf-16"), "refused"),
        (LINE + b"\n", "verified"),
    ],
)
def test_unpacked_files_of_other_kinds(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    assert verdict(path) == expected


def test_a_torn_line_is_no_other_mistake(tmp_path: Path) -> None:
    path, other = tmp_path / "torn.jsonl", LINE.replace(b'"r-0"', b'"other"')
    for text in (LINE + LINE[:500], LINE + LINE[:500] + b"\n" + other, LINE + b"\x00\x00\x00\n"):
        path.write_bytes(text)
        assert [found.verified is None for found in verify_file(path)].count(True) == 1


def test_a_line_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(cli.app, ["verify", "/dev/zero"])
    assert done.exit_code == 2
    assert "'/dev/zero' is no plain file; expected a file of records, or a folder of them" in done.stderr
    monkeypatch.setattr(record_lines, "LONGEST_LINE", 1000)
    (tmp_path / "long.jsonl").write_text("x" * 5000)
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "long.jsonl")])
    assert done.exit_code == 2
    assert "long.jsonl:1: a line of more than 1000 bytes; expected one record a line" in done.stderr.replace("\n", " ")


def test_a_folder_of_records_is_read(tmp_path: Path) -> None:
    for name in (b"b", b"a"):
        (tmp_path / f"{name.decode()}.jsonl").write_bytes(LINE.replace(b'"r-0"', b'"' + name + b'"'))
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 records, " in done.output
    (tmp_path / "none").mkdir()
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "none")])
    assert done.exit_code == 2
    told = done.stderr.replace("\n", " ")
    assert "holds no *.jsonl.gz and no *.jsonl; expected a file of records, or a folder of them" in told


def test_a_path_that_cannot_be_looked_at_is_refused() -> None:
    done = CliRunner().invoke(cli.app, ["verify", "a" * 300])
    assert done.exit_code == 2, repr(done.exception)
    assert "cannot be read: [Errno" in done.stderr.replace("\n", " ")
