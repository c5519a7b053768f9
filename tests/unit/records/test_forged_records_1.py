"""Records of schema 1 that somebody changed, or files that are none: `verify` ends with a verdict or one sentence."""

import copy
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.records.test_forged_records import ODD, places, verdict
from verl_multiturn.cli import main as cli
from verl_multiturn.records import lines as record_lines
from verl_multiturn.records.verified_files import verify_file

LINE = (ROOT / "tests" / "support" / "record_of_schema_1.jsonl").read_text().splitlines()[0]
GOOD: dict[str, Any] = json.loads(LINE)
OTHER = LINE.replace(GOOD["request_id"], "other")
TRAINED = ("ids", "mask", "logprobs", "versions", "turn_ids", "sources", "prompt_length")


def changed(draw: random.Random) -> dict[str, Any]:
    """Return the good record after one to three changes at random places."""
    record = copy.deepcopy(GOOD)
    for _ in range(draw.randint(1, 3)):
        # Places of the record's own columns are drawn as often as all others together.
        near = [(record, key) for key in record] + [(record, "receipts")]
        inner = [each for name in TRAINED for each in places(record.get(name))]
        inside = list(places(record))
        where = draw.choice([near, inside, inner or inside])
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
            holder[key] = copy.deepcopy(record.get(draw.choice(list(GOOD))))
        else:
            holder[key] = [holder[key]]
    return record


def is_same(value: Any, right: Any, name: str) -> bool:
    """Tell whether a column says what it said: a logprob of 0 is one of 0.0, and all sources above 2 are context."""
    if name == "logprobs":
        return bool(value == right)
    if name == "sources" and isinstance(value, list) and all(type(each) is int for each in value):
        value, right = [min(each, 2) for each in value], [min(each, 2) for each in right]
    return json.dumps(value) == json.dumps(right)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_no_structural_change_of_a_record_raises_or_passes(tmp_path_factory: Any, seed: int) -> None:
    record = changed(random.Random(seed))
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    path.write_text(json.dumps(record) + "\n")
    said = verdict(path)
    same = all(is_same(record.get(name), GOOD[name], name) for name in TRAINED)
    assert same or said != "verified"


def column(name: str, value: Any) -> str:
    return json.dumps({**GOOD, name: value})


DEEP = "[" * 100_000 + "]" * 100_000
LINES: dict[str, tuple[str, str]] = {
    "a column is an object": (column("mask", {}), "mask is {}, expected a list of integers"),
    "a column is null": (column("ids", None), "ids is None, expected a list of integers"),
    "a column is text": (column("mask", "1" * len(GOOD["mask"])), "mask is '111"),
    "a column of texts": (column("mask", [str(bit) for bit in GOOD["mask"]]), "mask has '"),
    "a column of truths": (column("mask", [bool(bit) for bit in GOOD["mask"]]), "mask has "),
    "a column of fractions": (column("ids", [float(each) for each in GOOD["ids"]]), "ids has "),
    "a column of lists": (column("ids", [[each] for each in GOOD["ids"]]), "ids has ["),
    "deep nesting": (LINE[:-1] + f', "x": {DEEP}}}', "nested too deeply"),
    "a line that is deep alone": (DEEP, "nested too deeply"),
    "an id beyond 64 bits": (LINE.replace('"ids": [', '"ids": [99999999999999999999999, ', 1), "ids has 9999"),
    "an integer of 5000 digits": (LINE.replace('"ids": [', f'"ids": [{"9" * 5000}, ', 1), "Exceeds the limit"),
    "a negative prompt": (column("prompt_length", -1), "prompt_length is -1, expected an integer from 0 to"),
    "a prompt beyond the row": (column("prompt_length", 10**9), "prompt_length is 1000000000, expected"),
    "a prompt of no integer": (column("prompt_length", 1.5), "prompt_length is 1.5"),
    "a key twice": (LINE[:-1] + ', "mask": [0]}', "has the key 'mask' twice"),
    "null": ("null", "expected a record, a JSON object, got null"),
    "a number": ("3", "expected a record, a JSON object, got a number"),
    "not a number": ("NaN", "expected a record, a JSON object, got a number"),
    "a truth": ("true", "expected a record, a JSON object, got true"),
    "a list": ("[]", "expected a record, a JSON object, got a list"),
    "a text": ('"record"', "expected a record, a JSON object, got a text"),
    "an empty object": ("{}", "no record of a conversation: 'request_id' is missing"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_no_record_is_named_as_what_it_is(tmp_path: Path, name: str) -> None:
    line, message = LINES[name]
    path = tmp_path / "forged.jsonl"
    path.write_text(f"{LINE}\n{line}\n")
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    said = done.stderr.replace("\n", " ")
    assert f"{path}:2: " in said
    assert message in said


def test_a_torn_line_is_no_other_mistake(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    for text in (f"{LINE}\n{LINE[:500]}", f"{LINE}\n{LINE[:500]}\n{OTHER}\n", f"{LINE}\n\x00\x00\x00\n"):
        path.write_text(text)
        assert [found.verified is None for found in verify_file(path)].count(True) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "refused"),
        (b"\n\n", "refused"),
        (b"\x00" * 100_000, "refused"),
        (gzip.compress(LINE.encode()), "refused"),
        (b"\xef\xbb\xbf" + LINE.encode(), "verified"),  # the mark of an editor on Windows
        (LINE.encode() + b"\r\n", "verified"),
        (LINE.encode("utf-16"), "refused"),
        (LINE.encode() + b"\n\n", "verified"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    assert verdict(path) == expected


def test_what_has_no_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        done = CliRunner().invoke(cli.app, ["verify", path])
        assert done.exit_code == 2
        assert f"'{path}' is no plain file; expected a file of records, or a folder of them" in done.stderr
    monkeypatch.setattr(record_lines, "LONGEST_LINE", 1000)
    (tmp_path / "long.jsonl").write_text("x" * 5000)
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "long.jsonl")])
    assert done.exit_code == 2
    assert "long.jsonl:1: a line of more than 1000 bytes; expected one record a line" in done.stderr.replace("\n", " ")


def test_a_folder_of_records_is_read(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(LINE.replace(GOOD["request_id"], name) + "\n")
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 records, " in done.output
    (tmp_path / "none").mkdir()
    done = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "holds no *.jsonl.gz and no *.jsonl; expected a file of records, or a folder of them" in done.stderr.replace(
        "\n", " "
    )


@pytest.mark.parametrize("name", ["request_id", "uid", "session_id", "row", "places", "generations"])
@pytest.mark.parametrize("value", [{}, [], [[]], None, 10**30, "x", 1.5], ids=repr)
def test_receipts_of_wrong_types(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "forged.jsonl"
    path.write_text(json.dumps({**GOOD, "receipts": {**GOOD["receipts"], name: value}}))
    verdict(path)


def test_a_path_that_cannot_be_looked_at_is_refused() -> None:
    done = CliRunner().invoke(cli.app, ["verify", "a" * 300])
    assert done.exit_code == 2, repr(done.exception)
    assert "cannot be read: [Errno" in done.stderr.replace("\n", " ")


def test_a_record_with_rows_has_no_columns_of_its_own(tmp_path: Path) -> None:
    """Else what is verified would not be what another reader sees."""
    row = {name: GOOD[name] for name in (*TRAINED, "receipts")}
    rest = {name: value for name, value in GOOD.items() if name not in row}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**rest, "rows": [row]}) + "\n")
    assert verdict(path) == "verified"
    for name in row:
        path.write_text(json.dumps({**rest, "rows": [row], name: GOOD[name]}) + "\n")
        assert verdict(path) == "refused", name
