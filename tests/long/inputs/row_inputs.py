"""Files, folders, words and locales as people have them; and rows that cannot be scored."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tests.long.inputs.input_cases import Case, Right, Seen, accept, refuse, run_command
from tests.long.inputs.input_files import Files, folder_of, in_folder, in_process
from verl_multiturn.rows.files import READERS, read_rows

ROWS = [
    {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    for text in ("2 + 2?", "Wie heißt du? \u2028 数据")
]
TOOLS = """\
tools:
- class_name: verl_multiturn.tools.calculator.CalculatorTool
  tool_schema:
    type: function
    function:
      name: calculator
      description: Straße
      parameters: {type: object, properties: {expression: {type: string}}}
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
BOM = codecs.BOM_UTF8
UTF8: dict[str, str | None] = {"LC_ALL": "C.UTF-8"}


def lines(*rows: Any, end: str = "\n") -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def parquet(*rows: Any) -> bytes:
    """Return rows as a Parquet file."""
    file = io.BytesIO()
    pd.DataFrame(list(rows)).to_parquet(file)
    return file.getvalue()


def validate(name: str, content: str | bytes, tools: str | bytes = TOOLS) -> Callable[[], Awaitable[Seen]]:
    """Return the door of `validate --dataset`: the value is the rows as they are read."""

    def run(folder: Path) -> Seen:
        seen = run_command("validate", "tools.yaml", "--dataset", name)
        if seen.kind != "accepted":
            return seen
        return Seen("accepted", read_rows(folder / name, list(READERS)), seen.sentence, seen.status)

    return in_folder(run, {"tools.yaml": tools, name: content})


def start(
    words: list[str],
    files: Files,
    environment: Mapping[str, str | None] = UTF8,
    before: str = "",
    shows: str = "",
) -> Callable[[], Awaitable[Seen]]:
    """Return the door of a command in a process of its own.

    Args:
        words: Its words; `FOLDER` is the folder with the files.
        files: The files.
        environment: Changes of the variables; `FOLDER` is the folder.
        before: A line of Python that runs first.
        shows: Text that the output has where it was understood.
    """

    async def door() -> Seen:
        import asyncio

        with folder_of(files) as folder:

            def here(text: str | None) -> Any:
                return text if text is None else text.replace("FOLDER", str(folder))

            seen = await asyncio.to_thread(
                in_process, *map(here, words), environment={k: here(v) for k, v in environment.items()}, before=before
            )
        if seen.kind == "accepted" and shows and here(shows) not in seen.sentence:
            return Seen("accepted", "something else", seen.sentence, seen.status)
        return Seen(seen.kind, shows or None, seen.sentence, seen.status)

    return door


def _files() -> list[Case]:
    plain = lines(*ROWS)
    read = accept(ROWS)
    good: list[tuple[str, str, str | bytes]] = [
        ("JSONL", "rows.jsonl", plain),
        ("JSONL with a BOM", "rows.jsonl", BOM + plain.encode()),
        ("JSONL with CRLF", "rows.jsonl", lines(*ROWS, end="\r\n")),
        ("JSONL with a BOM and CRLF", "rows.jsonl", BOM + lines(*ROWS, end="\r\n").encode()),
        ("JSONL with empty lines", "rows.jsonl", "\n" + lines(*ROWS, end="\n \n")),
        ("JSONL without a last line end", "rows.jsonl", plain.rstrip()),
        ("a list with a BOM", "rows.json", BOM + json.dumps(ROWS).encode()),
        ("a list with escapes", "rows.json", json.dumps(ROWS)),
        ("Parquet", "rows.parquet", parquet(*ROWS)),
        ("a name in Chinese", "数据.jsonl", plain),
        ("a name with =", "a=b.jsonl", plain),
        ("a name with a space", "my rows.jsonl", plain),
        ("a name with ~ inside", "a~b.jsonl", plain),
    ]
    bad: list[tuple[str, str, str | bytes, Right]] = [
        ("an LFS pointer, JSONL", "rows.jsonl", POINTER, refuse("Git LFS", "git lfs pull", "rows.jsonl")),
        ("an LFS pointer, Parquet", "rows.parquet", POINTER, refuse("Git LFS", "git lfs pull", "rows.parquet")),
        ("an LFS pointer with CRLF", "rows.json", POINTER.replace("\n", "\r\n"), refuse("Git LFS")),
        ("UTF-16", "rows.jsonl", plain.encode("utf-16"), refuse("UTF-16", "UTF-8")),
        ("UTF-16 without a mark", "rows.jsonl", plain.encode("utf-16-le"), refuse("UTF-8")),
        ("UTF-32", "rows.jsonl", plain.encode("utf-32"), refuse("UTF-32", "UTF-8")),
        ("Latin-1", "rows.jsonl", lines({**ROWS[0], "city": "Köln"}).encode("latin-1"), refuse("UTF-8")),
        ("a half line", "rows.jsonl", plain.rstrip()[:-3], refuse("line 2")),
        ("Python's repr", "rows.jsonl", repr(ROWS[0]), refuse("line 1")),
        ("an empty file", "rows.jsonl", "", refuse("rows.jsonl")),
        ("white space alone", "rows.jsonl", "\n \n", refuse("rows.jsonl")),
        ("numbers in the place of rows", "rows.jsonl", "1\n2\n", refuse("rows.jsonl", "mapping", status=1)),
        ("HTML in the place of JSON", "rows.json", "<!DOCTYPE html><p>Not found", refuse("rows.json")),
        ("an empty Parquet file", "rows.parquet", b"", refuse("rows.parquet")),
        ("JSON lines named Parquet", "rows.parquet", plain, refuse("rows.parquet")),
        ("gzip named JSONL", "rows.jsonl", b"\x1f\x8b\x08\x00" + bytes(range(40)), refuse("rows.jsonl")),
        ("capitals in the ending", "rows.JSONL", plain, refuse("rows.JSONL", "*.jsonl")),
        ("an ending that nobody reads", "rows.txt", plain, refuse("rows.txt")),
    ]
    yaml = [
        ("a YAML with a BOM", BOM + TOOLS.encode(), read),
        ("a YAML with CRLF", TOOLS.replace("\n", "\r\n"), read),
        ("a YAML in UTF-16", TOOLS.encode("utf-16"), refuse("tools.yaml")),
        ("a YAML in Latin-1", TOOLS.encode("latin-1"), refuse("tools.yaml", "UTF-8")),
        ("a YAML that is an LFS pointer", POINTER, refuse("tools.yaml", "Git LFS")),
        ("a YAML that is empty", "", refuse("tools.yaml")),
        ("a YAML with tabs", TOOLS.replace("  tool_schema", "\ttool_schema"), refuse("tools.yaml")),
    ]
    row = ROWS[0]
    rows: list[tuple[str, Any, tuple[str, ...]]] = [
        ("no reward_model", {k: v for k, v in row.items() if k != "reward_model"}, ("row 0", "reward_model")),
        ("no data_source", {k: v for k, v in row.items() if k != "data_source"}, ("row 0", "data_source")),
        ("data_source null", {**row, "data_source": None}, ("row 0", "data_source")),
        ("reward_model is text", {**row, "reward_model": "4"}, ("row 0", "reward_model")),
        ("ground_truth missing", {**row, "reward_model": {"style": "rule"}}, ("row 0", "ground_truth")),
        ("agent_name null", {**row, "agent_name": None}, ("row 0", "agent_name")),
        ("agent_name is a list", {**row, "agent_name": ["multiturn_agent"]}, ("row 0", "agent_name")),
        ("agent_name misspelt", {**row, "agent_name": "multitrun_agent"}, ("row 0", "multiturn_agent")),
        ("no prompt", {k: v for k, v in row.items() if k != "prompt"}, ("row 0", "prompt")),
        ("prompt is text", {**row, "prompt": "2 + 2?"}, ("row 0", "prompt")),
    ]
    return [
        *(Case("files", given, validate(name, content), read) for given, name, content in good),
        *(Case("files", given, validate(name, content), right) for given, name, content, right in bad),
        *(Case("files", given, validate("rows.jsonl", plain, content), right) for given, content, right in yaml),
        *(
            Case("settings", f"a row: {given}", validate("rows.jsonl", lines(value)), refuse(*words, status=1))
            for given, value, words in rows
        ),
        Case(
            "files",
            "no such file",
            in_folder(lambda _: run_command("validate", "tools.yaml", "--dataset", "no.jsonl"), {"tools.yaml": TOOLS}),
            refuse("no.jsonl"),
        ),
        Case(
            "files",
            "a folder in the place of rows",
            in_folder(
                lambda _: run_command("validate", "tools.yaml", "--dataset", "d.jsonl"),
                {"tools.yaml": TOOLS, "d.jsonl/x": ""},
            ),
            refuse("d.jsonl"),
        ),
    ]


def _words() -> list[Case]:
    plain = lines(*ROWS)
    files: Files = {"tools.yaml": TOOLS, "数据/a=b.jsonl": plain, "rows.jsonl": plain}
    at_home = {**UTF8, "HOME": "FOLDER"}
    validate = ["validate", "tools.yaml", "--dataset"]
    show = ["run", "quickstart", "--print", "--out", "FOLDER/out"]
    runs: list[tuple[str, list[str], Mapping[str, str | None], str, str, Right]] = [
        ("~ in a word", [*validate, "~/rows.jsonl"], at_home, "", "ok", accept()),
        ("~ in a YAML's name", ["validate", "~/tools.yaml"], at_home, "", "calculator", accept()),
        ("Chinese and = in a path", [*validate, "FOLDER/数据/a=b.jsonl"], UTF8, "", "ok", accept()),
        ("Chinese under LC_ALL=C", [*validate, "FOLDER/数据/a=b.jsonl"], {"LC_ALL": "C"}, "", "ok", accept()),
        (
            "no UTF-8 at all",
            [*validate, "rows.jsonl"],
            {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
            "",
            "ok",
            accept(),
        ),
        (
            "output that is ASCII",
            ["validate", "tools.yaml", "--dataset", "rows.jsonl"],
            {**UTF8, "PYTHONIOENCODING": "ascii"},
            "",
            "ok",
            accept(),
        ),
        (
            "a deleted folder",
            ["doctor"],
            UTF8,
            "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
            "",
            refuse("current folder was deleted"),
        ),
        (
            "a deleted folder, validate",
            ["validate", "FOLDER/tools.yaml"],
            UTF8,
            "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
            "",
            refuse("current folder was deleted"),
        ),
        (
            "Chinese and = in an override",
            [*show, "data.train_files=/数据/a=b.parquet"],
            UTF8,
            "",
            "/数据/a=b.parquet",
            accept(),
        ),
        ("~ in an override", [*show, "data.train_files=~/a.parquet"], at_home, "", "FOLDER/a.parquet", accept()),
        (
            "~ in a list of an override",
            [*show, "data.train_files=[~/a.parquet,~/b.parquet]"],
            at_home,
            "",
            "FOLDER/b.parquet",
            accept(),
        ),
        (
            "German and = in an override",
            [*show, "+recipe.text=Wie heißt du? a=b"],
            UTF8,
            "",
            "Wie heißt du? a=b",
            accept(),
        ),
        ("an override without =", [*show, "data.shuffle"], UTF8, "", "", refuse("data.shuffle")),
    ]
    return [
        Case("files", given, start(words, files, environment, before, shows), right, is_slow=True)
        for given, words, environment, before, shows, right in runs
    ]


def cases() -> list[Case]:
    """Return the inputs of this file."""
    return [*_files(), *_words()]
