"""Make rows for text to SQL: a question, its database and the gold query.

    python recipes/text2sql/prepare_data.py --out DIR [--source NovaSky-AI/SkyRL-SQL-653-data-newfmt] [--smoke]

A source has the columns of SkyRL-SQL (`prompt`, `db_id`, `data`, `reward_spec`), Spider (`db_id`, `question`, `query`)
or BIRD (`db_id`, `question`, `evidence`, `SQL`). For Spider and BIRD, the prompt gets the schema from the database
itself. The databases lie below the `root` of the tool YAML. With `--smoke`, small databases (`DIR/databases`) and a
tool YAML for them (`DIR/tools.yaml`) are made as well.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows
from verl_multiturn.tools.sql import find_database

TOOL = "sql"
SYSTEM = (
    f"You answer a question with one SQLite query. Think inside <think> and </think> first, and again after each "
    f"result. Explore the database with the tool `{TOOL}`, and try your query before you give it. It selects what the "
    f"question asks for and nothing more. Give it inside <solution> and </solution>."
)
# The folder of each set's databases in OmniSQL's archive.
FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "spider_test": "spider/test_database",
    "bird": "bird/train/train_databases",
    "bird_dev": "bird/dev_20240627/dev_databases",
}
# Name of a database, and its only table: name, columns, rows.
SHOPS = {
    "farm": ("animals", ("name", "age"), (("cow", 4), ("pig", 2), ("hen", 1))),
    "port": ("ships", ("name", "crew"), (("Ada", 9), ("Ben", 5), ("Eva", 7))),
    "shop": ("goods", ("name", "price"), (("cup", 3), ("pen", 1), ("bag", 8))),
    "park": ("trees", ("name", "height"), (("oak", 6), ("elm", 9), ("fir", 4))),
}


def row(entry: dict[str, Any], root: Path, source: str, **extra_info: Any) -> Row:
    """Return the row of an entry in one of the three formats.

    Args:
        entry: A row of the source.
        root: Folder of all databases.
        source: Set of an entry without a column `data`, a key of `FOLDERS`.
        extra_info: Other fields of `extra_info`.

    Raises:
        ConfigError: The set is unknown, the entry has no gold query, or its database cannot be read.
    """
    kind = entry.get("data") or source
    db_path = f"{FOLDERS[kind]}/{entry['db_id']}/{entry['db_id']}.sqlite" if kind in FOLDERS else None
    if db_path is None:
        raise ConfigError(f"the set {kind!r} is unknown; expected one of {sorted(FOLDERS)}")
    reward_spec = entry.get("reward_spec") or entry.get("reward_model") or {}
    query = reward_spec.get("ground_truth") or entry.get("SQL") or entry.get("query")
    if not query:
        raise ConfigError(f"no gold query in the columns {sorted(entry)}; expected 'reward_spec', 'SQL' or 'query'")
    if entry.get("prompt") is not None:
        # Their system message describes tags in the text. Ours, which describes the tool, takes its place.
        prompt: Any = [{"role": "system", "content": SYSTEM}]
        prompt += [message for message in entry["prompt"] if message["role"] != "system"]
    else:
        prompt = question_text(entry["question"], entry.get("evidence") or "", read_schema(root / db_path))
    return sql_row(kind, prompt, query, db_path, **extra_info)


def sql_row(data_source: str, prompt: Any, query: str, db_path: str, **extra_info: Any) -> Row:
    """Return a row with a question about one database.

    Args:
        data_source: Name that chooses the reward.
        prompt: The user's message, which then gets our system message, or all messages.
        query: The gold query.
        db_path: The database, relative to the folder of all databases.
        extra_info: Other fields of `extra_info`.
    """
    return make_row(
        data_source,
        prompt,
        {"sql": query, "db_path": db_path},
        system=SYSTEM if isinstance(prompt, str) else "",
        ability="sql",
        tools_kwargs={TOOL: {"create_kwargs": {"db_path": db_path}}},
        **extra_info,
    )


def question_text(question: str, evidence: str, schema: str) -> str:
    """Return the user's message.

    Args:
        question: The question.
        evidence: Hint of the data set; "": none.
        schema: Statements that made the tables.
    """
    known = f"\nGood to know: {evidence}" if evidence else ""
    return f"{schema}\nQuestion: {question}{known}"


def read_schema(database: Path) -> str:
    """Return the SQL statements that made the tables of a database.

    Args:
        database: File of the SQLite database.

    Raises:
        ConfigError: The file does not exist, or is not an SQLite database.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")
            return "\n".join(statement for (statement,) in found)
    except sqlite3.Error as error:
        raise ConfigError(f"{str(database)!r} is no SQLite database: {error}; see the README of this recipe") from error


def smoke_rows(root: Path) -> Iterator[Row]:
    """Make databases, and yield rows with three questions about each.

    In the demonstrations, the assistant looks at the table, tries the query and gives it as the answer.

    Args:
        root: Folder for the databases.
    """
    for name, (table, (key, number), values) in SHOPS.items():
        database = root / f"{name}.sqlite"
        database.parent.mkdir(parents=True, exist_ok=True)
        database.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(f"CREATE TABLE {table} ({key} TEXT, {number} INTEGER)")
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", values)
            connection.commit()
        largest = f"SELECT {key} FROM {table} ORDER BY {number} DESC LIMIT 1"
        for question, query in (
            (f"Which of the {table} has the largest {number}?", largest),
            (f"How many {table} are there?", f"SELECT COUNT(*) FROM {table}"),
            (f"What is the sum of the {number} of all {table}?", f"SELECT SUM({number}) FROM {table}"),
        ):
            said = [
                f"<think>I look at {table}.</think>\n{tool_call(TOOL, {'query': f'SELECT * FROM {table}'})}",
                f"<think>I try a query.</think>\n{tool_call(TOOL, {'query': query})}",
                f"<think>That is it.</think>\n<solution>{query}</solution>",
            ]
            prompt = question_text(question, "", read_schema(database))
            yield sql_row("synsql", prompt, query, database.name, demonstration=said)


def make_tools(root: Path) -> dict[str, Any]:
    """Return the entry for a tool YAML of a tool that uses the databases in a folder."""
    return {"class_name": "verl_multiturn.tools.sql.SqlTool", "config": {"root": str(root.resolve()), "processes": 2}}


def configured_root(tools: Path | None) -> Path:
    """Return the folder of databases that a tool YAML names.

    Args:
        tools: The tool YAML.

    Returns:
        The first `root` of a tool; the current folder if there is none, or no tool YAML.
    """
    entries = yaml.safe_load(tools.read_text(encoding="utf-8"))["tools"] if tools is not None else []
    return next((Path(entry["config"]["root"]) for entry in entries if "root" in (entry.get("config") or {})), Path())


def check_databases(splits: dict[str, list[Row]], root: Path) -> None:
    """Check that the database of each row exists.

    Args:
        splits: Rows by split.
        root: Folder of all databases.

    Raises:
        ConfigError: A database is missing.
    """
    named = {
        each["extra_info"]["tools_kwargs"][TOOL]["create_kwargs"]["db_path"]
        for rows in splits.values()
        for each in rows
    }
    for db_path in sorted(named):
        find_database(root.resolve(), db_path, None)


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", "NovaSky-AI/SkyRL-SQL-653-data-newfmt")
    parser.add_argument("--set", default="spider", choices=FOLDERS, help="of a source without a column `data`")
    parser.add_argument("--splits", nargs=2, default=("train", "validation"), help="what the source calls its splits")
    args = parser.parse_args()
    if args.smoke:
        made = list(smoke_rows(args.out / "databases"))
        splits = {"train": made[:8], "test": made[8:]}
        args.tools = args.out / "tools.yaml"
        entry = make_tools(args.out / "databases")
        args.tools.write_text(yaml.safe_dump({"tools": [entry]}, sort_keys=False), encoding="utf-8")
    else:
        root = configured_root(args.tools)
        entries = read_splits(args.source, splits=tuple(args.splits))
        splits = {split: [row(entry, root, args.set) for entry in rows] for split, rows in entries.items()}
        check_databases(splits, root)
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
