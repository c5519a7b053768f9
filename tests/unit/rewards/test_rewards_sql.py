"""Execution match of SQL queries, in processes that only read."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.scoring import (
    FAILED,
    NO_ANSWER,
    OUTAGE,
    RIGHT,
    RIGHT_UNFORMATTED,
    TIMED_OUT,
    UNJUDGEABLE,
    WRONG,
    Numbers,
    children,
    score,
)
from verl_multiturn import ConfigError
from verl_multiturn.processes.pool import WorkerEndedError, WorkerPool
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.sql import is_ordered

pytestmark = pytest.mark.slow

WORKER = "sql_worker"


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()
    assert not children(WORKER)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    with sqlite3.connect(tmp_path / "shop" / "shop.sqlite") as database:
        database.executescript(
            """
            CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price REAL);
            INSERT INTO item VALUES (1, 'tea', 2), (2, 'coffee', 3.5), (3, 'milk', 2), (4, 'salt', NULL);
            """
        )
    database.close()
    return tmp_path


def truth(sql: str) -> dict[str, str]:
    return {"sql": sql, "db_id": "shop"}


def wrap(sql: str) -> str:
    return f"<think>hm</think>\n<solution>{sql}</solution>"


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
NESTED = ", ".join(f"t{i}(x) AS (SELECT a.x FROM t{i - 1} a, t{i - 1} b)" for i in range(1, 28))
FOR_EVER_COMPILED = f"WITH t0(x) AS (SELECT 1), {NESTED} SELECT * FROM t27"

PRICES = "SELECT name, price FROM item WHERE price < 3"
TABLE: list[tuple[str, str, Numbers]] = [
    (wrap("SELECT name, price FROM item WHERE price = 2.0;"), PRICES, RIGHT),
    (wrap("SELECT name, price FROM item WHERE price < 3 ORDER BY name DESC"), PRICES, RIGHT),
    (wrap("```sql\nSELECT name, price FROM item WHERE id IN (1, 3)\n```"), PRICES, RIGHT),
    (f"```sql\n{PRICES}\n```", PRICES, RIGHT_UNFORMATTED),
    (f"<solution>SELECT 1</solution> no: <solution>{PRICES}</solution>", PRICES, RIGHT_UNFORMATTED),
    (wrap("SELECT price, name FROM item WHERE price < 3"), PRICES, WRONG),
    (wrap("SELECT name FROM item WHERE price < 3"), PRICES, WRONG),
    (wrap(f"{PRICES} UNION ALL {PRICES}"), PRICES, WRONG),
    (wrap(f"{PRICES} LIMIT 1"), PRICES, WRONG),
    (wrap("SELECT name FROM item ORDER BY id"), "SELECT name FROM item ORDER BY id", RIGHT),
    (wrap("SELECT name FROM item ORDER BY -id"), "SELECT name FROM item ORDER BY id", WRONG),
    (wrap("SELECT 1 WHERE 0"), "SELECT id FROM item WHERE id > 9", RIGHT),
    (wrap("SELECT 1, 2 WHERE 0"), "SELECT id FROM item WHERE id > 9", WRONG),
    (wrap("SELECT NULL"), "SELECT price FROM item WHERE id = 4", RIGHT),
    (wrap("SELEC"), PRICES, WRONG),
    (wrap("DROP TABLE item"), PRICES, WRONG),
    (wrap("INSERT INTO item(name) VALUES ('x')"), PRICES, WRONG),
    (wrap(f"{PRICES}; DROP TABLE item"), PRICES, WRONG),
    (wrap("ATTACH '/etc/passwd' AS x"), PRICES, WRONG),
    (wrap("SELECT '\0\ud800'"), PRICES, WRONG),
    (wrap("SELECT " + "1+" * 100_000 + "1"), PRICES, WRONG),
    (wrap("SELECT " + "(" * 5_000 + "1" + ")" * 5_000), PRICES, WRONG),
    (wrap("SELECT printf('%.*c', 900000, 'x') FROM item a, item b, item c, item d, item e, item f"), PRICES, WRONG),
    (wrap(""), PRICES, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    (PRICES, PRICES, NO_ANSWER),
    (f"<solution>{PRICES}", PRICES, NO_ANSWER),
    (f"<think>{wrap(PRICES)}<think>", PRICES, RIGHT),
    (f"<think><solution>{PRICES}</solution>", PRICES, NO_ANSWER),
    (f"<sql>{PRICES}</sql>", PRICES, NO_ANSWER),
]


async def test_queries(root: Path) -> None:
    before = (root / "shop" / "shop.sqlite").read_bytes()
    options = {"sql": {"root": str(root), "processes": 1}}
    for text, gold, expected in TABLE:
        assert await score("skyrl_sql", text, truth(gold), **options) == expected, text[:200]
    assert (root / "shop" / "shop.sqlite").read_bytes() == before


async def test_as_sets(root: Path) -> None:
    options = {"sql": {"root": str(root), "compare": "set"}}
    ordered = "SELECT price FROM item ORDER BY id"
    assert await score("bird", wrap("SELECT DISTINCT price FROM item"), truth(ordered), **options) == RIGHT
    assert await score("bird", wrap("SELECT price FROM item WHERE id = 1"), truth(ordered), **options) == WRONG


@pytest.mark.parametrize("query", [ENDLESS, FOR_EVER_COMPILED], ids=["running", "compiling"])
async def test_a_query_that_takes_for_ever_is_counted(root: Path, query: str) -> None:
    # With so much memory, the time is up first, even on a fast machine.
    memory = {"max_memory_mb": 16_384}
    options = {"sql": {"root": str(root), "timeout_s": 2.0, "processes": 1, "format_weight": 1.0, **memory}}
    assert await score("skyrl_sql", wrap(query), truth(PRICES), **options) == TIMED_OUT
    assert await score("skyrl_sql", wrap(PRICES), truth(PRICES), **options) == RIGHT, "it still works"
    if query == ENDLESS:  # a gold query that is late is not a fault of the answer
        assert await score("skyrl_sql", wrap(PRICES), truth(ENDLESS), **options) == UNJUDGEABLE


async def test_a_gold_query_that_fails_is_no_fault_of_the_answer(root: Path) -> None:
    options = {"sql": {"root": str(root)}}
    assert await score("skyrl_sql", wrap(PRICES), truth("SELECT nme FROM item"), **options) == UNJUDGEABLE


async def test_a_query_that_ends_its_process_is_a_failure_and_one_without_any_process_an_outage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sql": {"root": str(root)}}
    ask, dead = WorkerPool.ask, ["SELECT 1"]

    async def ends(self: WorkerPool, request: Any) -> Any:
        if any(request["query"].startswith(query) for query in dead):
            raise WorkerEndedError("the worker process ended")
        return await ask(self, request)

    monkeypatch.setattr(WorkerPool, "ask", ends)
    assert await score("skyrl_sql", wrap("SELECT 1"), truth(PRICES), **options) == FAILED
    dead.append("SELECT")
    assert await score("skyrl_sql", wrap(PRICES), truth(PRICES), **options) == OUTAGE


THOUGHT = "<think>hm</think>"
SKYRL: list[tuple[list[str], float]] = [
    ([f"{THOUGHT}<sql>SELECT 2</sql>", f"{THOUGHT}<solution>SELECT 1;</solution>"], 1.0),
    ([f"{THOUGHT}<solution>SELECT 2</solution>"], 0.0),
    ([f"{THOUGHT}<solution>SELEC</solution>"], 0.0),
    ([f"{THOUGHT}<solution></solution>"], 0.0),
    ([f"{THOUGHT}<solution>```sql\nSELECT 1\n```</solution>"], 0.0),
    # Right answers in another format.
    (["<solution>SELECT 1</solution>"], -1.0),
    ([f"{THOUGHT}<solution>SELECT 1"], -1.0),
    ([f"{THOUGHT}SELECT 1"], -1.0),
    ([f"{THOUGHT}<solution>SELECT 1</solution></solution>"], -1.0),
    ([f"{THOUGHT}<solution>SELECT 1<sql></sql></solution>"], -1.0),
    # Two solutions, in different turns and in a thought.
    ([f"{THOUGHT}<solution>SELECT 1</solution>", f"{THOUGHT}<solution>SELECT 1</solution>"], -1.0),
    (["<think><solution>SELECT 1</solution></think><solution>SELECT 1</solution>"], -1.0),
    # Each turn after an observation must begin with a thought, until the solution.
    ([THOUGHT, "<solution>SELECT 1</solution>"], -1.0),
    ([THOUGHT, "well, <think>hm</think>", f"{THOUGHT}<solution>SELECT 1</solution>"], -1.0),
    ([f"{THOUGHT}<observation>1</observation> so <solution>SELECT 1</solution>"], -1.0),
    (["call", f"\n {THOUGHT}<solution>SELECT 1</solution>"], 1.0),
    ([f"{THOUGHT}<solution>SELECT 1</solution>", "Done."], 1.0),
    (["call", "the template opened it</think><solution>SELECT 1</solution>"], 1.0),
    ([], -1.0),
]


async def test_the_scores_of_skyrl_sql(root: Path) -> None:
    options = {"sql": {"root": str(root), "compare": "set", "format": "skyrl"}}
    for texts, expected in SKYRL:
        found = await score("skyrl_sql", "", truth("SELECT 1"), {"assistant_texts": texts}, **options)
        assert found[0] == expected, texts
        assert found[2] == float(expected >= 0), texts
        assert set(found[4:]) == {0.0}, texts


async def test_a_gold_query_without_rows_may_reward_nothing(root: Path) -> None:
    empty = "SELECT id FROM item WHERE id > 9"
    for rewarded, expected in ((True, RIGHT), (False, WRONG)):
        options = {"sql": {"root": str(root), "reward_empty_gold": rewarded}}
        assert await score("spider", wrap("SELECT 1 WHERE 0"), truth(empty), **options) == expected
        assert await score("spider", wrap("SELECT 1"), truth("SELECT 1"), **options) == RIGHT


async def test_many_at_once_share_few_processes(root: Path) -> None:
    options = {"sql": {"root": str(root), "processes": 2}}
    scores = [score("spider", wrap(f"SELECT {i}"), truth(f"SELECT {i - i % 2}"), **options) for i in range(100)]
    assert await asyncio.gather(*scores) == [RIGHT if i % 2 == 0 else WRONG for i in range(100)]
    assert len(children(WORKER)) == 2


async def test_ground_truths(root: Path) -> None:
    options = {"sql": {"root": str(root)}}
    path = {"sql": PRICES, "db_path": "shop/shop.sqlite", "db_id": None, "target": None}
    for given in (truth(PRICES), json.dumps(truth(PRICES)), path):
        assert await score("spider", wrap(PRICES), given, **options) == RIGHT


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (truth("SELECT 1"), {}, r"reward_kwargs.sql.root: expected the folder of the databases, got None"),
        (truth("SELECT 1"), {"root": "/no/such"}, r"got '/no/such'"),
        ("SELECT 1", None, r"ground_truth of 'spider': expected {'sql': …}"),
        ({"db_id": "shop"}, None, r"expected {'sql': …}"),
        ({"sql": "SELECT 1"}, None, r"expected either 'db_path' or 'db_id'"),
        ({"sql": "SELECT 1", "db_id": "../x"}, None, r"no file under"),
    ],
)
async def test_a_mistake_of_the_author(root: Path, given: Any, options: Any, message: str) -> None:
    options = {"root": str(root)} if options is None else options
    with pytest.raises(ConfigError, match=message):
        await score("spider", wrap("SELECT 1"), given, sql=options)


def test_whose_order_by_it_is() -> None:
    ordered = [
        "SELECT 1 ORDER BY 1",
        "select 1\norder  by 1",
        "SELECT (SELECT 1) ORDER BY (x)",
        "SELECT 1 UNION SELECT 2 ORDER BY 1",
        "SELECT 1 -- )\nORDER BY 1",
        "SELECT 1 /* ( */ ORDER /* by */ BY 1",
        "SELECT 'it''s (' ORDER BY 1;",
    ]
    others = [
        "SELECT 1",
        "SELECT * FROM (SELECT 1 ORDER BY 1)",
        "WITH c AS (SELECT 1 ORDER BY 1) SELECT * FROM c",
        "SELECT 'order by'",
        'SELECT "order by" FROM t',
        'SELECT "a"" order by" FROM t',
        "SELECT `order by`, [order by] FROM t",
        "SELECT row_number() OVER (ORDER BY x) FROM t",
        "SELECT group_concat(x ORDER BY x) FROM t",
        "SELECT border, bye FROM t -- order by",
        "SELECT 1 /* no ORDER BY here */",
        "SELECT 'never closed ORDER BY",
    ]
    assert [is_ordered(query) for query in ordered + others] == [True] * len(ordered) + [False] * len(others)
