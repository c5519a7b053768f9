"""Reading the rows of files as people have them: marks, line ends, encodings, and other things in a file's place."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_multiturn.checking.data_rows import validate_dataset
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import find_model
from verl_multiturn.rows.files import READERS, read_rows, read_text, refuse_encoding, refuse_pointer
from verl_multiturn.tools.bm25 import read_documents
from verl_multiturn.tools.loading.registry import load_tools

ROWS = [{"a": 1, "b": "Straße"}, {"a": 2, "b": "数据\u2028 x"}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SUFFIXES = list(READERS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    {
        "plain": "\n".join(LINES),
        "mark": codecs.BOM_UTF8 + "\n".join(LINES).encode(),
        "CRLF": "\r\n".join(LINES) + "\r\n",
        "mark and CRLF": codecs.BOM_UTF8 + "\r\n".join(LINES).encode(),
        "empty lines": "\n\n" + "\n \n".join(LINES) + "\n\n",
    }.items(),
    ids=lambda each: each[0],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_lines_are_read_as_people_write_them(content: tuple[str, str | bytes], suffix: str, tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / f"rows{suffix}", content[1]), SUFFIXES) == ROWS


def test_a_mark_is_no_part_of_a_list_of_a_name_or_of_a_text(tmp_path: Path) -> None:
    listed = write(tmp_path / "rows.json", codecs.BOM_UTF8 + json.dumps(ROWS).encode())
    assert read_rows(listed, SUFFIXES) == ROWS
    table = write(tmp_path / "rows.csv", codecs.BOM_UTF8 + b'a,b\r\n1,"x\r\ny"\r\n')
    assert read_rows(table, SUFFIXES) == [{"a": "1", "b": "x\r\ny"}]
    assert read_text(write(tmp_path / "t", codecs.BOM_UTF8 + b"Yes."), "t", "x") == "Yes."


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_named(encoding: str, mark: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ("\ufeff" * mark + "\n".join(LINES)).encode(encoding))
    name = encoding[:6].upper()
    with pytest.raises(ConfigError, match=f"it is text in {name}; save it in UTF-8"):
        read_rows(path, SUFFIXES)
    with pytest.raises(ConfigError, match=f"it is text in {name}; save it in UTF-8"):
        read_text(path, "--row 'x'", "name another")
    with pytest.raises(ConfigError, match=f"is text in {name}; save it in UTF-8"):
        refuse_encoding(path)


@pytest.mark.parametrize(("content", "byte"), [("Köln".encode("latin-1"), 1), ("ab§".encode("cp1252"), 2)])
def test_what_is_no_utf_8_is_named(content: bytes, byte: int, tmp_path: Path) -> None:
    said = rf"cannot be read \(ValueError: line 1: its byte {byte} is no text in UTF-8; save it in UTF-8\)"
    with pytest.raises(ConfigError, match=said):
        read_rows(write(tmp_path / "rows.jsonl", content), SUFFIXES)


def test_a_file_that_is_one_endless_line_is_named(tmp_path: Path) -> None:
    with (path := tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate((1 << 26) + 1)  # takes no room
    with pytest.raises(ConfigError, match="line 1 has 64 MiB or more; expected a row a line"):
        read_rows(path, SUFFIXES)


def test_a_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="the column 'a' is there twice; rename one"):
        read_rows(tmp_path / "rows.parquet", SUFFIXES)


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_a_file_that_is_too_large_to_be_read_at_once_is_named(name: str, tmp_path: Path) -> None:
    with (path := tmp_path / name).open("wb") as file:
        file.truncate((1 << 30) + (1 << 20))
    with pytest.raises(ConfigError, match="it has 1025 MiB, of 1024 that are read at once; write large data as JSONL"):
        read_rows(path, [".json", ".csv"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, "tools.yaml' is a Git LFS pointer, a few lines in the place of the file; run `git lfs pull`"),
        ("tools: [ß]".encode("latin-1"), "cannot be read (its byte 8 is no text in UTF-8; save it in UTF-8)"),
        ("tools: []".encode("utf-16"), "cannot be read (it is text in UTF-16; save it in UTF-8)"),
    ],
    ids=["pointer", "Latin-1", "UTF-16"],
)
def test_what_lies_in_the_place_of_a_yaml_file_is_named(content: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_tools(write(tmp_path / "tools.yaml", content))
    assert said in str(refused.value)


def test_a_half_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "\n".join(LINES)[:-3])
    with pytest.raises(ConfigError, match=r"line 2, column \d+: Unterminated string"):
        read_rows(path, SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pointer_in_the_place_of_rows_is_refused(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"train{suffix}", POINTER)
    said = f"'{path}' is a Git LFS pointer, a few lines in the place of the file; run `git lfs pull` in its repository"
    with pytest.raises(ConfigError) as refused:
        read_rows(path, SUFFIXES)
    assert str(refused.value) == said
    if suffix == ".parquet":
        with pytest.raises(ConfigError, match="is a Git LFS pointer"):
            validate_dataset(path, {})
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        read_text(path, "--row", "name another")


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_pointer_in_a_models_folder_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    write(tmp_path / name, POINTER)
    with pytest.raises(ConfigError, match=rf"{name}' is a Git LFS pointer"):
        find_model(tmp_path)


def test_a_pointer_in_a_corpus_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "wiki.jsonl", POINTER)
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        list(read_documents(tmp_path))


def test_what_is_no_pointer_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "long", POINTER + "x" * 1024)
    write(tmp_path / "other", "version 1\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "not-there")
    refuse_pointer(tmp_path)
    refuse_pointer(tmp_path / "not-there")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: the key 'a' is there twice; remove one"),
        ("b.jsonl", '{"a": {"b": 1, "b": 1}}\n', "line 1: the key 'b' is there twice; remove one"),
        ("c.json", '[{"a": 1, "a": 2}]', "the key 'a' is there twice; remove one"),
        ("d.csv", "a,b,a\n1,2,3\n", "the column 'a' is there twice; rename one"),
        ("e.csv", "a,b\n1,2\n1,2,3\n", "line 3 has more cells than there are columns; quote what has a comma"),
    ],
)
def test_no_value_of_a_row_is_lost(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_rows(write(tmp_path / name, content), SUFFIXES)
    assert said in str(raised.value)


def test_columns_of_a_csv_file_stay(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.csv", 'a,b\n1,"2,3"\n4\n'), SUFFIXES) == [
        {"a": "1", "b": "2,3"},
        {"a": "4", "b": None},
    ]
