"""`SqlTool`: its answers, its refusals, and the attacks that it survives."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Call, conversation
from verl_multiturn import ConfigError
from verl_multiturn.processes import sql_worker
from verl_multiturn.tools.sql import SqlTool, find_database

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "databases"
    (folder / "shop").mkdir(parents=True)
    with sqlite3.connect(folder / "shop" / "shop.sqlite") as database:
        database.executescript(
            """
            CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price REAL);
            INSERT INTO item VALUES (1, 'tea', 2.5), (2, 'coffee', NULL), (3, 'a|b' || char(10) || 'c', 0.1);
            INSERT INTO item(name) VALUES (CAST(x'ff41' AS TEXT)), (x'0102'), (printf('%.*c', 500, 'x'));
            CREATE VIEW cheap AS SELECT name FROM item WHERE price < 1;
            CREATE VIRTUAL TABLE note USING fts5(text);
            INSERT INTO note VALUES ('a cup of tea'), ('a cup of coffee');
            CREATE TABLE number AS
                WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 1000) SELECT x FROM c;
            """
        )
    database.close()
    (folder / "secret.txt").write_text("not for models")
    (tmp_path / "outside.sqlite").write_bytes((folder / "shop" / "shop.sqlite").read_bytes())
    return folder


def tool_of(root: Path, **config: Any) -> SqlTool:
    return SqlTool({"root": str(root), **config})


@pytest.fixture(params=[60])
async def ask(root: Path, request: pytest.FixtureRequest) -> AsyncIterator[Call]:
    before = contents(root)
    limits = {"timeout_s": request.param, "max_memory_mb": 128, "processes": 1}
    async with conversation(tool_of(root, **limits), db_id="shop") as call:
        yield call
        assert (await call(query="SELECT count(*) FROM item"))[0].text == "count(*)\n6\n(1 row)", "it still works"
    assert contents(root) == before, "nothing was written"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


ANSWERS = {
    "SELECT name, price FROM item WHERE id < 4": "name | price\ntea | 2.5\ncoffee | NULL\na\\|b\\nc | 0.1\n(3 rows)",
    "SELECT name FROM item WHERE id = 4": "name\n\N{REPLACEMENT CHARACTER}A\n(1 row)",
    "SELECT name FROM item WHERE id = 5": "name\n<2 bytes>\n(1 row)",
    "SELECT name FROM item WHERE id = 6": f"name\n{'x' * 200}…[500 characters]\n(1 row)",
    "SELECT * FROM cheap WHERE 0": "name\n(0 rows)",
    "SELECT name FROM sqlite_master WHERE type = 'view'": "name\ncheap\n(1 row)",
    "SELECT name FROM pragma_table_info('number')": "name\nx\n(1 row)",
    "PRAGMA table_info(number)": "cid | name | type | notnull | dflt_value | pk\n0 | x |  | 0 | NULL | 0\n(1 row)",
    "SELECT snippet(note, 0, '[', ']', '', 9) AS s FROM note('tea')": "s\na cup of [tea]\n(1 row)",
    "SELECT sum(value) FROM json_each('[1, 2]')": "sum(value)\n3\n(1 row)",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c LIMIT 3) SELECT sum(x) FROM c": "sum(x)\n6\n(1 row)",
    "SELECT row_number() OVER (ORDER BY x) FROM number LIMIT 1": "row_number() OVER (ORDER BY x)\n1\n(1 row)",
    "SELECT upper('é') || strftime('%Y', '2001-02-03') AS a, round(2.567, 2) AS b": "a | b\né2001 | 2.57\n(1 row)",
}


async def test_answers(ask: Call) -> None:
    assert {query: (await ask(query=query))[0].text for query in ANSWERS} == ANSWERS


async def test_rows_and_characters_are_limited(root: Path) -> None:
    async with conversation(tool_of(root, max_rows=3, max_characters=100), db_id="shop") as call:
        response, reward, metrics = await call(query="SELECT x FROM number")
        assert response.text == "x\n1\n2\n3\n(the first 3 rows; there are more)"
        assert (reward, metrics) == (0.0, {"rows": 3})
        assert (await call(query="SELECT x FROM number LIMIT 3"))[0].text == "x\n1\n2\n3\n(3 rows)"
        response, _, metrics = await call(query="SELECT name FROM item ORDER BY id DESC")
        assert response.text == "name\n(the first 0 rows; there are more)"
        wide = ", ".join(f"{i} AS column_{i}" for i in range(500))
        assert len((await call(query=f"SELECT {wide}"))[0].text) < 200


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT nme FROM item", "no such column: nme"),
        ("SELEC", "syntax error"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT ?", "binding"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT '\0'", "null character|unrecognized token"),
    ],
)
async def test_mistakes_are_answered_in_sqlites_words(ask: Call, query: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await ask(query=query)


WRITES = [
    "INSERT INTO item(name) VALUES ('x')",
    "UPDATE item SET price = 0",
    "DELETE FROM item",
    "DROP TABLE item",
    "CREATE TABLE t(x)",
    "CREATE TEMP TABLE t AS SELECT * FROM item a, item b, item c",
    "CREATE TEMP VIEW v AS SELECT 1",
    "CREATE VIRTUAL TABLE t USING fts5(x)",
    "CREATE TRIGGER t AFTER INSERT ON item BEGIN SELECT 1; END",
    "ALTER TABLE item RENAME TO thing",
    "REINDEX",
    "ANALYZE",
    "VACUUM",
    "VACUUM INTO 'copy.sqlite'",
    "BEGIN EXCLUSIVE",
    "SAVEPOINT s",
    "INSERT INTO note(note) VALUES ('rebuild')",
]
ELSEWHERE = [
    "ATTACH '{outside}' AS other",
    "ATTACH 'file:{outside}?mode=rwc' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "SELECT load_extension('{outside}')",
    "SELECT readfile('{root}/secret.txt')",
    "SELECT writefile('{root}/new', 'x')",
    "SELECT edit('x', 'touch {root}/new')",
    "SELECT fts3_tokenizer('simple', x'00')",
    "SELECT sqlite_compileoption_get(0)",
    "SELECT * FROM fsdir('/')",
    "SELECT * FROM dbstat",
    "SELECT random()",
    "SELECT randomblob(10)",
]
PRAGMAS = [
    "PRAGMA writable_schema = 1",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA temp_store_directory = '/'",
    "PRAGMA temp_store = 1",
    "PRAGMA query_only = 0",
    "PRAGMA trusted_schema = 1",
    "PRAGMA user_version = 7",
    "PRAGMA mmap_size = 1000000000",
    "PRAGMA cache_size = 1000000000",
    "PRAGMA wal_checkpoint",
    "PRAGMA database_list",
    "SELECT * FROM pragma_database_list",
]


REFUSED = r"not authorized|authorization denied|no such (function|table)|constructor failed"


@pytest.mark.parametrize("queries", [WRITES, ELSEWHERE, PRAGMAS], ids=["writes", "elsewhere", "pragmas"])
async def test_nothing_but_reading_this_database(ask: Call, root: Path, queries: list[str]) -> None:
    for query in queries:
        with pytest.raises(ValueError, match=REFUSED):
            await ask(query=query.format(root=root, outside=root.parent / "outside.sqlite"))


def nested(levels: int) -> str:
    """Return a query that SQLite needs 2^levels steps to compile, without a look at its progress handler."""
    tables = ["t0(x) AS (SELECT 1)"]
    tables += [f"t{i}(x) AS (SELECT a.x FROM t{i - 1} a, t{i - 1} b)" for i in range(1, levels)]
    return f"WITH {', '.join(tables)} SELECT * FROM t{levels - 1}"


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
BOMBS = {
    "recursion": f"{ENDLESS} SELECT count(*) FROM c",
    "recursion, unique": f"{ENDLESS} SELECT DISTINCT x, printf('%.*c', 10000, x) FROM c ORDER BY 2, 1 DESC",
    "recursion, sorted": f"{ENDLESS} SELECT x, printf('%.*c', 100000, x) AS y FROM c ORDER BY y",
    "join": "SELECT count(*) FROM number a, number b, number c, number d",
    "join, sorted": "SELECT * FROM number a, number b, number c, number d ORDER BY a.x * b.x - c.x * d.x",
    "zeroblob": "SELECT zeroblob(2000000000)",
    "hex of zeroblob": "SELECT hex(zeroblob(900000))",
    "replace": "SELECT replace(printf('%.*c', 900000, 'x'), 'x', printf('%.*c', 900000, 'y'))",
    "instr": "SELECT instr(printf('%.*c', 990000, 'x'), printf('%.*c', 490000, 'x') || 'y')",
    "group_concat": "SELECT group_concat(printf('%.*c', 10000, x)) FROM number",
    "json": "SELECT json_group_array(printf('%.*c', 10000, x)) FROM number",
    "compiled for ever": nested(28),
    "compiled with views": "SELECT " + "+".join(["(SELECT count(*) FROM cheap)"] * 3000),
    "deep": f"SELECT {'(' * 5000}1{')' * 5000}",
    "compound": " UNION ALL ".join(["SELECT 1"] * 5000),
    "long": f"SELECT '{'x' * 2_000_000}'",
}


STOPPED = r"stopped after|too much memory|too big|too (large|many)|stack overflow|maximum depth|ended the database's"


@pytest.mark.parametrize("ask", [2], indirect=True, ids=[""])
@pytest.mark.parametrize("name", BOMBS)
async def test_bombs_do_not_go_off(ask: Call, name: str) -> None:
    with pytest.raises(ValueError, match=STOPPED):
        await ask(query=BOMBS[name])


@pytest.mark.parametrize("ask", [2], indirect=True, ids=[""])
async def test_a_text_that_is_too_long_is_null_to_sqlite_or_takes_too_long(ask: Call) -> None:
    """SQLite counts to the end of a `printf` that no longer fits: some seconds, on a fast machine few enough."""
    try:
        said = (await ask(query="SELECT printf('%.*c', 2000000000, 'x') AS y"))[0].text
    except ValueError as error:
        said = str(error)
    assert re.search(rf"^y\nNULL\n|{STOPPED}", said)


def test_a_mistake_is_never_called_late(root: Path) -> None:
    limits = {"timeout_s": 0, "max_rows": 10, "max_characters": 100}
    request = {"path": str(root / "shop" / "shop.sqlite"), "query": "SELECT nope FROM item"}
    assert sql_worker.answer(request, limits) == {"error": "no such column: nope"}
    assert sql_worker.answer({**request, "query": BOMBS["recursion"]}, limits) == {"late": True}


async def test_a_cancelled_query_leaves_no_process(root: Path) -> None:
    tool = tool_of(root, timeout_s=60, max_memory_mb=4096)
    async with conversation(tool, db_id="shop") as call:
        for query in (BOMBS["join"], nested(24)):
            for wait_s in (0, 0.001, 0.3):  # before it starts, while it starts, while it works
                task = asyncio.create_task(call(query=query))
                await asyncio.sleep(wait_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not children_of_this_process()


def children_of_this_process() -> set[int]:
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", process, "stat").read_text()
            command = Path("/proc", process, "cmdline").read_text()
        except OSError:
            continue  # the process has ended meanwhile
        if int(stat.rpartition(")")[2].split()[1]) == os.getpid() and "sql_worker" in command:
            found.add(int(process))
    return found


async def test_processes_are_shared_kept_and_ended(root: Path) -> None:
    tool = tool_of(root, processes=2)
    gc.collect()  # handles of earlier tests are closed now, and not meanwhile
    descriptors = len(os.listdir("/proc/self/fd"))
    async with conversation(tool, "a", db_id="shop") as a:
        async with conversation(tool, "b", db_path="shop/shop.sqlite") as b:
            calls = [call(query=f"SELECT x FROM number WHERE x = {i}") for i in range(1, 41) for call in (a, b)]
            texts = [response.text for response, _, _ in await asyncio.gather(*calls)]
            assert texts == [f"x\n{i}\n(1 row)" for i in range(1, 41) for _ in "ab"]
            kept = children_of_this_process()
            assert len(kept) == 2
            for limits in map(limits_of, kept):
                assert re.search(r"Max file size +0 ", limits)
                assert re.search(rf"Max address space +{256 * 2**20} ", limits)
        await tool.release("c")  # the `create` was cancelled before it ran
        assert children_of_this_process() == kept
        for process in kept:  # killed by the system, for example
            kill(process)
        assert (await a(query="SELECT 1"))[0].text == "1\n1\n(1 row)"
    assert not children_of_this_process()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def limits_of(process: int) -> str:
    return Path("/proc", str(process), "limits").read_text()


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


async def test_one_conversation_reads_its_own_database_only(root: Path) -> None:
    with sqlite3.connect(root / "other.db") as database:
        database.execute("CREATE TABLE t AS SELECT 'other' AS x")
    database.close()
    tool = tool_of(root, processes=1)
    async with conversation(tool, "a", db_id="shop") as a, conversation(tool, "b", db_id="other") as b:
        assert (await b(query="SELECT x FROM t"))[0].text == "x\nother\n(1 row)"
        with pytest.raises(ValueError, match="no such table: t"):
            await a(query="SELECT x FROM t")


@pytest.mark.parametrize(
    "given",
    [
        {"db_path": "../outside.sqlite"},
        {"db_path": "shop/../../outside.sqlite"},
        {"db_path": "{parent}/outside.sqlite"},
        {"db_path": "link.sqlite"},
        {"db_path": "folder/outside.sqlite"},
        {"db_path": "secret.txt"},
        {"db_path": "shop"},
        {"db_path": "file:shop/shop.sqlite?mode=rwc"},
        {"db_path": "shop/shop.sqlite?mode=rwc"},
        {"db_path": ""},
        {"db_path": "a\0b"},
        {"db_path": "x" * 5000},
        {"db_path": "circle"},
        {"db_id": "../outside"},
        {"db_id": "missing"},
        {},
        {"db_id": "shop", "db_path": "shop/shop.sqlite"},
    ],
    ids=repr,
)
def test_no_path_leaves_the_root(root: Path, given: dict[str, str]) -> None:
    (root / "link.sqlite").symlink_to(root.parent / "outside.sqlite")
    (root / "folder").symlink_to(root.parent)
    (root / "circle").symlink_to(root / "circle")
    given = {key: value.format(parent=root.parent) for key, value in given.items()}
    with pytest.raises(ConfigError, match="create_kwargs"):
        find_database(root.resolve(), given.get("db_path"), given.get("db_id"))


@pytest.mark.parametrize("name", ["a b?mode=rwc#.sqlite", "per%cent.sqlite", "ünï.sqlite"])
async def test_names_that_mean_something_in_an_address(root: Path, name: str) -> None:
    (root / name).write_bytes((root / "shop" / "shop.sqlite").read_bytes())
    async with conversation(tool_of(root), db_path=name) as call:
        assert (await call(query="SELECT count(*) FROM note"))[2] == {"rows": 1}
    assert (root / name).stat().st_size == (root / "shop" / "shop.sqlite").stat().st_size


async def test_a_link_within_the_root_a_journal_and_a_broken_file(root: Path) -> None:
    (root / "alias.sqlite").symlink_to(root / "shop" / "shop.sqlite")
    database = sqlite3.connect(root / "wal.sqlite")
    database.executescript(
        "PRAGMA journal_mode = WAL; CREATE TABLE t AS SELECT 1 AS x; PRAGMA wal_checkpoint(TRUNCATE)"
    )
    database.close()
    (root / "broken.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    tool = tool_of(root)
    for name, query in (("alias", "SELECT 1 FROM note"), ("wal", "SELECT x FROM t")):
        async with conversation(tool, name, db_id=name) as call:
            assert (await call(query=query))[2]["rows"]
    async with conversation(tool, db_id="broken") as call:
        with pytest.raises(ValueError, match=r"not a database|malformed"):
            await call(query="SELECT 1 FROM t")


def test_settings_that_cannot_work(root: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        tool_of(root / "missing")
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        tool_of(root, max_row=3)
    with pytest.raises(ConfigError, match=r"config.timeout_s: .*, got 0"):
        tool_of(root, timeout_s=0)
