"""The index: reads, repeated reads, and messages about unreadable files."""

import gzip
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import verl_multiturn.records.index.cache as index_cache
import verl_multiturn.records.index.index as index_module
import verl_multiturn.records.index.sources as sources_module
import verl_multiturn.records.index.table as table_module
from tests.support.sample_records import BEGAN, joined_row, sample_record, sample_run, sample_run_file
from tests.support.view_samples import TOKENIZER
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.documents.folder import RunDocuments
from verl_multiturn.records import schema
from verl_multiturn.records.index.cache import kept_at
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.index.query import parse
from verl_multiturn.records.index.rows import fate_of
from verl_multiturn.records.index.table import Table
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read.fates import count, fates_of
from verl_multiturn.records.read.joins import JoinedRow, name_of, table_of, write
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write.run_file import path_of

START = "20261126T101500_5f3a2c"


def index_of(folder: Path) -> Index:
    made = Index(Records(folder))
    made.refresh()
    return made


def rows(index: Index) -> dict[str, dict[str, Any]]:
    return {row["request_id"]: row for row in index.table.to_pylist()}


def fates_in(index: Index) -> dict[str, tuple[Any, ...]]:
    names = ("fate", "why", "step", "trained_step", "trained_tokens", "score")
    return {request_id: tuple(row[name] for name in names) for request_id, row in rows(index).items()}


def lines_file(folder: Path) -> Path:
    (path,) = folder.glob("*.lines.jsonl")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    sample_run(folder, steps=2, groups=2, size=4, start=START)
    return folder


def test_a_row_has_line_summary_score_and_join(run: Path) -> None:
    row = rows(index_of(run))[f"{START}-t2-1-0"]
    place = row.pop("offset"), row.pop("place")
    assert place[0] > 0 or place[1] > 0
    assert row == {
        "request_id": f"{START}-t2-1-0", "uid": f"{START}-t2-1", "number": 0, "validation": False, "step": 2,
        "rerolled_from": None, "began": BEGAN, "ended": BEGAN + 3.0, "event": "end", "said": "", "why": "",
        "data_source": "sums",
        "index": "7", "stop_reason": "finished", "valid": True, "rows": 1, "turns": 2, "calls": 1, "failed_calls": 0,
        "prompt_tokens": 6, "response_tokens": 10, "sampled_tokens": 7, "seconds": 3.0, "generate_s": 2.0,
        "tools_s": 0.5, "interaction_s": 0.0, "score": 1.0, "file": 0, "trained_step": 2, "update": 0,
        "trained_tokens": 7, "untrained": "", "group_mean": 0.25, "group_std": 0.5, "join": 1, "fate": "trained",
        "acc": 1.0, "fate_step": None, "partly": False, "undone": False, "joined_rows": 1,
            "roles": None,
    }  # fmt: skip


def test_fates_are_those_of_the_records(run: Path) -> None:
    index = index_of(run)
    assert Counter(row["fate"] for row in rows(index).values()) == count(fates_of(Records(run)))
    assert Counter(row["fate"] for row in rows(index).values()) == {
        "trained": 16,
        "validated": 2,
        "cut": 1,
        "raised": 1,
    }


def test_fates_without_a_join(tmp_path: Path) -> None:
    sample_run(tmp_path, start=START, join=False)
    found = Counter(row["fate"] for row in rows(index_of(tmp_path)).values())
    assert found == count(fates_of(Records(tmp_path)))


def test_the_file_is_opened_again(run: Path) -> None:
    index = index_of(run)
    index.save()
    again = Index(Records(run))
    assert again.table == index.table
    assert not again.refresh()


@pytest.mark.parametrize("damage", ["shorter", "join", "strange", "version"])
def test_an_index_that_does_not_fit_is_built_anew(run: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(index_of(run))
    index_of(run).save()
    if damage == "shorter":
        lines = lines_file(run).read_bytes()
        lines_file(run).write_bytes(lines[: lines.rindex(b'{"event":"begin"')])
        del expected[f"{START}-raised"]
    elif damage == "join":
        for path in (run / "join").glob("validation*"):
            path.rename(path.with_name(f"validation-000007-{START}.parquet"))
    elif damage == "strange":
        kept_at(run).write_bytes(b"PAR1 and nothing else")
    else:
        monkeypatch.setattr(index_module, "_VERSION", "0")
    assert len(Index(Records(run))) == 0
    assert rows(index_of(run)).keys() == expected.keys()


def test_only_what_was_appended_is_read(run: Path) -> None:
    index = index_of(run)
    line = {"event": "begin", "request_id": "new", "uid": "new", "number": 3, "step": 2, "at": BEGAN + 50}
    with lines_file(run).open("a") as file:
        file.write(json.dumps(line)[:20])
    assert not index.refresh()
    with lines_file(run).open("a") as file:
        file.write(json.dumps(line)[20:] + "\n")
    assert index.refresh()
    assert rows(index)["new"]["fate"] == "open"
    with lines_file(run).open("a") as file:
        file.write(json.dumps({**line, "event": "cancel", "why": "cut", "at": BEGAN + 51}) + "\n")
    assert index.refresh()
    assert rows(index)["new"] | {"began": BEGAN + 50, "ended": BEGAN + 51, "fate": "cut"} == rows(index)["new"]
    assert len(index) == 21


@pytest.mark.parametrize(
    ("seed", "share"),
    [*((seed, 0.3) for seed in range(3)), *(pytest.param(seed, 1.0, marks=pytest.mark.long) for seed in range(3))],
)
def test_a_followed_run_has_the_rows_of_one_that_is_read_at_its_end(tmp_path: Path, seed: int, share: float) -> None:
    """A share of the times, another index reads all that is there; the whole run in any case."""
    rng, looks = random.Random(seed), random.Random(seed)
    source, folder = tmp_path / "source", tmp_path / "followed"
    sample_run(source, start=START)
    sample_run(source, start="20261127T000000_aaaaaa", join=seed % 2 == 0)
    cut = {
        "event": "step",
        "start": START,
        "step": 3,
        "join": None,
        "failed": ["whole-group"],
        "filtered": ["cancelled"],
    }
    more = [cut, {"event": "end", "start": START, "at": BEGAN + 90}][: 1 + seed % 3]
    waiting: list[list[tuple[Path, bytes]]] = []  # the unwritten rest of each file, last first
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.name.endswith(".gz"):
            text = path.read_bytes()
            if path.name == "steps.jsonl":
                text += b"".join(map(line_of, more))
            parts = text.splitlines(keepends=True) if path.suffix == ".jsonl" else [text]
            waiting.append([(folder / path.relative_to(source), part) for part in parts][::-1])
    (folder / "join").mkdir(parents=True)
    index = index_of(folder)
    while waiting:
        for _ in range(rng.choice([1, 1, 2, 9])):
            if waiting:
                one = rng.choice(waiting)
                path, part = one.pop()
                with path.open("ab") as file:
                    file.write(part)
                waiting = [each for each in waiting if each]
        index.refresh()
        if not waiting or looks.random() < share:
            assert fates_in(index) == fates_in(index_of(folder))


def test_slices_and_parts_change_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(index_of(run))
    for module, name, value in (
        (index_module, "_SLICE", 3), (index_cache, "ROWS", 4), (sources_module, "_BLOCK", 100),
        (index_module, "_UIDS", 1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert rows(index_of(run)) == expected


def test_strange_lines_cost_themselves_alone(run: Path) -> None:
    path = lines_file(run)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"event":"begin"\n{"event":"begin","request_id":"x"}\n\n[1]\n')
        file.write(b'{"event":"end","request_id":"y","at":1,"summary":{"rows":"many","seconds":"inf"}}\n')
    index = index_of(run)
    *lines, odd = index.faults
    assert [fault.split(" is left out")[0] for fault in lines] == [
        f"{path}, offset {size + at}: a line" for at in (0, 17, 53)
    ]
    assert odd == f"{path}: 1 ends have no begin, that of request 'y' first; they count"
    assert len(index) == 21
    assert (rows(index)["y"]["rows"], rows(index)["y"]["seconds"]) == (None, float("inf"))


def test_a_torn_join_costs_itself_alone(run: Path) -> None:
    path = run / "join" / f"step-000002-{START}.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    index = index_of(run)
    (fault,) = index.faults
    assert fault.startswith(f"{path}: it is left out, it is no join: ")
    assert len(index) == 20


def test_records_without_lines_are_found(run: Path) -> None:
    expected = rows(index_of(run))
    lines_file(run).unlink()
    found = rows(index_of(run))
    assert found.keys() == {name for name, row in expected.items() if row["event"] == "end"}
    assert {row["fate"] for row in found.values()} == {"trained", "validated"}
    assert found[f"{START}-t1-0-0"]["sampled_tokens"] == 7


def test_pages_are_the_same_chosen_or_sorted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([index_of(run)])
    for sort in ("score", "request_id", "seconds", "trained_step"):
        for descending in (False, True):
            chosen = table.page([], sort, descending, 3, 9)
            with monkeypatch.context() as patch:
                patch.setattr(table_module, "_FIRST", 0)
                assert table.page([], sort, descending, 3, 9) == chosen
    total, page = table.page(parse("fate=trained"), "number", True, 0, 5)
    assert total == 16
    assert [row["number"] for row in page] == [3, 3, 3, 3, 2]


def test_rows_without_a_value_come_last(run: Path) -> None:
    table = Table([index_of(run)])
    for descending in (False, True):
        _, page = table.page([], "score", descending, 0, 100)
        assert [row["score"] for row in page][-2:] == [None, None]


def test_a_conversation_is_found_by_its_id(run: Path) -> None:
    table = Table([index_of(run)])
    found = table.find(f"{START}-t1-1-3")
    assert found is not None
    assert (found["uid"], found["number"]) == (f"{START}-t1-1", 3)
    assert table.find("nobody") is None


def forged(folder: Path, name: str = "view-index.parquet") -> None:
    """Write an index in which every score is 1.0 beside the records, as a version that believed it wrote it."""
    table = index_of(folder).table
    score = pa.array([1.0] * len(table))
    state = {"version": "2", "read": {}, "files": [lines_file(folder).name.removesuffix(".lines.jsonl")]}
    state |= {"joins": ["../../private/x.parquet"], "told": [], "looked": {}}
    table = table.set_column(table.schema.get_field_index("score"), "score", score)
    pq.write_table(table.replace_schema_metadata({"verl_multiturn": json.dumps(state)}), folder / name)


def test_an_index_beside_the_records_is_not_believed(run: Path) -> None:
    expected = rows(index_of(run))
    forged(run)
    assert len(Index(Records(run))) == 0
    assert rows(index_of(run)) == expected


def test_an_index_is_kept_in_the_users_cache_alone(run: Path, cache: Path) -> None:
    before = sorted(path.name for path in run.rglob("*"))
    assert index_of(run).save() == ""
    assert sorted(path.name for path in run.rglob("*")) == before
    (kept,) = (cache / "verl-multiturn" / "view").iterdir()
    assert kept == kept_at(run)
    assert kept.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["lines", "join", "steps", "records"])
def test_a_file_that_was_rewritten_is_read_again(run: Path, what: str) -> None:
    """Size, name and age are those of before: `touch` and `dd` can do that."""
    if what == "records":
        lines_file(run).unlink()
    index_of(run).save()
    assert len(Index(Records(run))) > 0
    path = {
        "lines": lines_file, "join": lambda run: next((run / "join").glob("step*")),
        "steps": lambda run: run / "steps.jsonl", "records": lambda run: next(run.glob("*.jsonl.gz")),
    }[what](run)  # fmt: skip
    found, text = path.stat(), path.read_bytes()
    if what == "lines":
        text = text.replace(b'"turns":2', b'"turns":9')
    with path.open("r+b") as file:
        file.write(text)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    again = Index(Records(run))
    if what == "steps":
        assert again.refresh()
    elif what == "lines":
        assert len(again) == 0
        assert {row["turns"] for row in rows(index_of(run)).values()} == {9, None}
    else:
        assert len(again) == 0


def test_a_run_that_went_on_is_read_from_where_it_was_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_of(run).save()
    line = {"event": "begin", "request_id": "new", "uid": "new", "number": 3, "step": 2, "at": BEGAN + 50}
    with lines_file(run).open("a") as file:
        file.write(json.dumps(line) + "\n")
    again = Index(Records(run))
    assert len(again) == 20
    assert again.refresh()
    assert rows(again).keys() == rows(index_of(run)).keys()
    again.save()
    text = lines_file(run).read_bytes()
    lines_file(run).write_bytes(text.replace(b'"turns":2', b'"turns":9') + text[-len(json.dumps(line)) - 1 :])
    assert len(Index(Records(run))) == 0  # grown, and changed before that


def test_a_file_that_is_replaced_while_it_is_followed(run: Path) -> None:
    index = index_of(run)
    text = lines_file(run).read_bytes().replace(b'"turns":2', b'"turns":9')
    path = lines_file(run)
    path.unlink()
    path.write_bytes(text)
    assert index.refresh()
    assert {row["turns"] for row in rows(index).values()} == {9, None}
    line = {"event": "begin", "request_id": "new", "uid": "new", "number": 3, "step": 2, "at": BEGAN + 50}
    other = run / "other.lines.jsonl"
    other.write_bytes(line_of(line))
    assert index.refresh()
    with other.open("r+b") as file:  # the same file, with more in it
        file.write(line_of({**line, "request_id": "newer"}))
    assert index.refresh()
    assert "newer" in rows(index)
    assert "new" not in rows(index)


def test_a_folder_that_is_replaced_while_it_is_followed(run: Path) -> None:
    """The run is done again: the same conversations in files of other names."""
    documents = Documents([run])
    documents.refresh()
    before = documents.page("", "began", False, 0, 50), documents.run()
    (member,) = run.glob("*.jsonl.gz")
    member.write_bytes(b"torn" + member.read_bytes())
    documents.record(f"{START}-t1-0-0")
    assert "cannot be read" in documents.faults()[0]
    assert documents.pieces(0) is None
    shutil.rmtree(run)
    sample_run(run, steps=2, groups=2, size=4, start=START)
    documents.refresh()
    assert documents.faults() == []
    shutil.copytree(TOKENIZER, run / "own")
    path_of(run, START).write_bytes(line_of(sample_run_file(start=START, tokenizer={"path": str(run / "own")})))
    assert documents.pieces(0) is not None
    assert (documents.page("", "began", False, 0, 50), documents.run()) == before
    assert documents.open() == Documents([run]).open()
    assert documents.faults() == []


@pytest.mark.parametrize("what", ["open", "link", "file", "nowhere"])
def test_no_folder_for_the_cache(run: Path, what: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cache / "verl-multiturn" / "view"
    if what == "open":
        place.mkdir(parents=True)
        place.chmod(0o770)
    elif what == "link":
        place.parent.mkdir(parents=True)
        (cache / "other").mkdir(mode=0o700)
        place.symlink_to(cache / "other")
    elif what == "file":
        place.parent.mkdir(parents=True)
        place.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    index = index_of(run)
    assert "no index is kept: " in index.save()
    assert len(index) == 20


def test_two_viewers_of_one_process_keep_an_index_each(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, digest_of = index_of(run), index_of(run), index_cache._digest_of

    def meanwhile(packed: pa.Buffer) -> str:
        monkeypatch.setattr(index_cache, "_digest_of", digest_of)
        assert second.save() == ""  # while the first one is half-written
        return digest_of(packed)

    monkeypatch.setattr(index_cache, "_digest_of", meanwhile)
    assert first.save() == ""
    assert index_cache.kept(run) is not None
    assert [path.name for path in kept_at(run).parent.iterdir()] == [kept_at(run).name]


def test_old_indices_make_room(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_MOST_FILES", 2)
    for name in ("a", "b", "c"):
        shutil.copytree(run, tmp_path / name / "records")
        index_of(tmp_path / name / "records").save()
    kept = [kept_at(tmp_path / name / "records").exists() for name in ("a", "b", "c")]
    assert kept == [False, True, True]


def test_a_line_without_an_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "LONGEST_LINE", 2_000)
    monkeypatch.setattr(sources_module, "_BLOCK", 1_000)
    with lines_file(run).open("ab") as file:
        file.write(b"x" * 10_000)
    index = index_of(run)
    assert len(index) == 20
    assert "has more than 2000 bytes; the rest is left out" in next(iter(index.faults))


def test_a_conversation_of_two_files_counts_once(run: Path) -> None:
    expected = {name: row["score"] for name, row in rows(index_of(run)).items()}
    text = lines_file(run).read_bytes().replace(b'"turns":2', b'"turns":9')
    (run / "copy.lines.jsonl").write_bytes(text)
    index = index_of(run)
    assert {name: row["score"] for name, row in rows(index).items()} == expected
    assert {row["turns"] for row in rows(index).values()} == {2, None}
    (fault,) = index.faults
    assert fault.startswith(f"{run}/copy.lines.jsonl: 20 conversations are left out, that of request")
    index.save()
    assert list(Index(Records(run)).faults) == [fault]


def change_lines(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(new) + "\n" for line in lines if (new := change(line)) is not None))


def test_a_kill_between_a_member_and_its_lines(run: Path) -> None:
    whole = rows(index_of(run))
    change_lines(lines_file(run), lambda line: line if line["event"] == "begin" else None)
    found = index_of(run)
    ended = {name: {**row, "said": None} for name, row in whole.items() if row["event"] == "end"}
    assert {name: row for name, row in rows(found).items() if row["event"] == "end"} == ended
    assert {row["event"] for name, row in rows(found).items() if name not in ended} == {"begin"}
    assert list(found.faults) == []


def test_a_summary_that_a_line_lacks_is_made_of_its_record(run: Path) -> None:
    whole, first = rows(index_of(run)), f"{START}-t1-0-0"
    change_lines(lines_file(run), lambda line: {**line, "summary": None} if line["request_id"] == first else line)
    found = index_of(run)
    assert rows(found)[first] == whole[first]
    assert list(found.faults) == [f"{lines_file(run)}: request {first!r} has no summary; it is made of its record"]


def test_lines_that_a_file_has_twice_are_named(run: Path) -> None:
    expected, path = rows(index_of(run)), lines_file(run)
    path.write_bytes(path.read_bytes() * 2)
    at_once = index_of(run)
    assert rows(at_once) == expected
    assert [fault.partition(", that of")[0] for fault in at_once.faults] == [f"{path}: 20 conversations are left out"]
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    later = index_of(run)
    with path.open("ab") as file:
        file.write(text[len(text) // 2 :])
    later.refresh()
    assert (rows(later), later.faults) == (expected, at_once.faults)


@pytest.mark.parametrize("what", ["another run's", "rows", "joins", "size"])
def test_a_forged_index_is_not_believed(run: Path, tmp_path: Path, what: str) -> None:
    """Every entry of it is as the honest one has it but for the forged one."""
    expected, honest = rows(index_of(run)), index_of(run)
    if what == "another run's":
        other = tmp_path / "other"
        sample_run(other, steps=1, start=START)
        index_of(other).save()
        kept_at(other).rename(kept_at(run))
    else:
        assert honest.save() == ""
        head, _, packed = kept_at(run).read_bytes().partition(b"\n")
        state = json.loads(head)
        if what == "joins":
            state["joins"] = ["../../private/x.parquet", *state["joins"][1:]]
        elif what == "size":
            state["identities"] = {name: [*own[:2], own[2] - 1, own[3]] for name, own in state["identities"].items()}
        else:
            table = pq.read_table(pa.BufferReader(packed))
            score = pa.array([1.0] * len(table))
            sink = pa.BufferOutputStream()
            pq.write_table(table.set_column(table.schema.get_field_index("score"), "score", score), sink)
            packed = sink.getvalue().to_pybytes()
        kept_at(run).write_bytes(json.dumps(state).encode() + b"\n" + packed)
    assert len(Index(Records(run))) == 0
    assert rows(index_of(run)) == expected


def test_fates_are_the_same_in_all_that_is_said_of_them(tmp_path: Path) -> None:
    """The index has them as `fates_of` has, whose rows come from the lines and joins themselves."""
    again = "20991126T101500_ffffff"
    sample_run(tmp_path, start=START)
    causes: list[list[str | None]] = [
        [None, "too_old"], ["too_old", None], ["no_signal", None], ["no_signal", "void"], ["void", "no_signal"],
        ["unsampled", None], ["unsampled", "unsampled"], [None, None], ["void", "void"],
    ]  # fmt: skip
    made = [
        JoinedRow(f"several-{at}", "several", at, row, False, 3, trained=int(cause is None), untrained=cause)
        for at, own in enumerate(causes)
        for row, cause in enumerate(own)
    ]
    write(tmp_path, name_of(False, 3, START), table_of(made))
    line = {"event": "step", "start": START, "step": 4, "began": BEGAN, "ended": BEGAN, "phases": {}, "metrics": {}}
    left = {"evicted": ["late"], "rerolled": {"slow": "anew"}, "join": None, "rows": 0}
    more = [{**line, **left}, {**line, "start": again, "step": 2, "join": None, "rows": 0}]
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(b"".join(map(line_of, more)))
    with lines_file(tmp_path).open("ab") as file:
        for name in ("late", "slow"):
            begun = {"event": "begin", "request_id": name, "uid": name, "number": 0, "step": 2, "at": BEGAN + 50}
            file.write(line_of(begun) + line_of({**begun, "event": "end", "at": BEGAN + 51}))
    found = {fate.request_id: fate for fate in map(fate_of, rows(index_of(tmp_path)).values())}
    assert found == {fate.request_id: fate for fate in fates_of(Records(tmp_path))}
    assert found["late"].step == 4
    assert sum(fate.undone for fate in found.values()) == 8 + len(causes)
    assert sum(fate.partly for fate in found.values()) > 0


def test_rows_that_stand_twice_in_a_join_count_once(run: Path) -> None:
    expected = rows(index_of(run))
    path = run / "join" / f"step-000002-{START}.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table]), path)
    index = index_of(run)
    assert rows(index) == expected
    assert [each["rows"] for each in index.figures().values()] == [8, 8, 2]


def damage_records(folder: Path, what: str) -> None:
    """Damage a folder's file of records, or write beside or behind it as a killed process or a stranger does."""
    (packed,) = folder.glob("*.jsonl.gz")
    if what == "copy":
        shutil.copy(packed, folder / "copy.jsonl.gz")
    elif what == "torn end":
        with packed.open("ab") as file:
            file.write(gzip.compress(b"x" * 3000)[:-9])
    else:
        text = bytearray(packed.read_bytes())
        text[len(text) // 2] ^= 0xFF
        packed.write_bytes(text)
        if what == "without lines":
            lines_file(folder).unlink()
        else:
            change_lines(lines_file(folder), lambda line: {**line, "summary": None})


@pytest.mark.parametrize("what", ["copy", "torn end", "without lines", "without summaries"])
def test_a_kept_index_has_the_faults_of_records_that_are_not_read_again(run: Path, what: str) -> None:
    damage_records(run, what)
    first = RunDocuments(Records(run))
    first.index.refresh()
    assert first.index.save() == ""
    again = RunDocuments(Records(run))
    again.index.refresh()
    assert first.faults()
    assert sorted(again.faults()) == sorted(first.faults())


def test_a_fault_of_a_member_that_became_whole_is_not_kept(run: Path) -> None:
    (packed,) = run.glob("*.jsonl.gz")
    whole = packed.read_bytes()
    damage_records(run, "torn end")
    index_of(run).save()
    packed.write_bytes(whole)
    again = RunDocuments(Records(run))
    again.index.refresh()
    assert again.faults() == []


def test_a_summary_of_a_record_that_cannot_be_read(run: Path) -> None:
    damage_records(run, "without summaries")
    faults = list(index_of(run).faults)
    assert len(faults) == 18
    assert all(fault.endswith(" has no summary; its record cannot be read") for fault in faults)


def test_a_kept_index_whose_state_is_not_whole_is_not_taken(run: Path) -> None:
    assert index_of(run).save() == ""
    head, _, packed = kept_at(run).read_bytes().partition(b"\n")
    state = json.loads(head)
    for name in state:
        others = {other: value for other, value in state.items() if other != name}
        kept_at(run).write_bytes(json.dumps(others).encode() + b"\n" + packed)
        assert len(Index(Records(run))) == 0, name


def test_a_conversation_that_only_two_joins_have_counts_once(run: Path) -> None:
    """The run did step 1 again, and had kept the conversation's row; no line of it is there."""
    later = "20261127T101500_aaaaaa"
    (run / f"run-{later}.json").write_text(json.dumps(sample_run_file(start=later, resumed_from=0)))
    for start, score in ((START, 0.0), (later, 1.0)):
        path = run / "join" / f"step-000001-{start}.parquet"
        before = pq.read_table(path).to_pylist() if path.exists() else []
        row = joined_row(sample_record(request_id="alone", uid="alone"), score=score)
        pq.write_table(pa.Table.from_pylist([*before, row], schema.JOINED), path)
    table = index_of(run).table
    found = table.filter(pc.equal(table["request_id"], "alone")).to_pylist()
    assert [(row["score"], row["undone"]) for row in found] == [(1.0, False)]
    assert sum(count(fates_of(Records(run))).values()) == len(table)


def test_lines_that_come_after_their_record_was_read_are_no_repetition(run: Path) -> None:
    """A reader who follows a run may look between a member and its lines."""
    expected, path = rows(index_of(run)), lines_file(run)
    text = path.read_bytes()
    change_lines(path, lambda line: line if line["event"] == "begin" else None)
    begun = path.read_bytes()
    path.write_bytes(b"")
    followed = index_of(run)
    for more in (begun, b"".join(line for line in text.splitlines(keepends=True) if line not in begun)):
        with path.open("ab") as file:
            file.write(more)
        followed.refresh()
    assert list(followed.faults) == []
    assert rows(followed) == expected
