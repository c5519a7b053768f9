"""`sql` in SkyRL-SQL's format beside the rule that SkyRL publishes.

The rule (`skyrl_gym/envs/sql/utils.py` and its tests, NovaSky-AI/SkyRL) is reimplemented here over a whole transcript,
as SkyRL sees it.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.long.rewards.parity import Compared, score
from verl_multiturn.rewards.sql import is_ordered

GOLD = "SELECT name FROM employees WHERE salary > 150"
EMPTY = "SELECT name FROM employees WHERE salary > 1000"
RIGHT = "SELECT name FROM employees WHERE id = 2;"
T, OPENED = "<think>hm</think>\n", "a template opens the thought"
# Assistant turns, gold query, and the row of docs/reference/reward-functions.md that states a difference.
CASES: list[tuple[list[str], str, str]] = [
    # Cases of SkyRL's own tests.
    ([f"{T}<sql>SELECT 1</sql>", f"{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"{T}<sql>SELECT 1</sql>", f"{T}<solution>SELECT name FROM employees WHERE id = 1</solution>"], GOLD, ""),
    ([T, f"{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT}<solution>more</solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT}</solution>extra</solution>"], GOLD, ""),
    ([f"{T}{RIGHT}</solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT}"], GOLD, ""),
    ([f"{T}some text<solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT} <sql>x</sql></solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT} <observation>x</observation></solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT} <THINK></solution>"], GOLD, ""),
    ([f"{T}<solution></solution>"], GOLD, ""),
    ([f"{T}{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"<observation>x</observation>\n{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"<observation>x</observation>\nwell {T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"</solution><solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"</solution>{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    (["</solution>"], GOLD, ""),
    ([""], GOLD, ""),
    (["no tags at all"], EMPTY, ""),
    ([f"{T}<solution>SELECT 1 WHERE 0;</solution>"], EMPTY, ""),
    ([f"{T}<solution>SELECT name FROM employees</solution>"], EMPTY, ""),
    ([f"{T}<solution>SELECT 1 WHERE 0;</solution>"], GOLD, ""),
    # Cases of ours.
    ([T, f"{T}<solution>{RIGHT}</solution>", f"{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([T, f"<solution>{RIGHT}</solution>"], GOLD, ""),
    ([T, "so", f"{T}<solution>{RIGHT}</solution>"], GOLD, ""),
    (["so", f" {T}<solution>{RIGHT}</solution>"], GOLD, ""),
    ([f"{T}<solution>```sql\n{RIGHT}\n```</solution>"], GOLD, ""),
    ([f"{T}```sql\n{RIGHT}\n```"], GOLD, ""),
    ([f"<think><solution>{RIGHT}</solution></think>"], GOLD, ""),
    ([f"{T}<solution>SELECT no FROM employees</solution>"], GOLD, ""),
    ([f"{T}<solution>{RIGHT.upper()}</solution>"], GOLD, ""),
    ([f"hm</think><solution>{RIGHT}</solution>"], GOLD, OPENED),
    ([f"{T}<solution>DELETE FROM employees RETURNING 'Jane Smith'</solution>"], GOLD, "a query that writes"),
]


def skyrl_says(transcript: str, gold: str, database: Path) -> float:
    """Score a transcript by SkyRL's rule: 1.0 when right, 0.0 when wrong, -1.0 when in another format."""
    parts = re.fullmatch(
        r"((?:(?!<solution>).)*)<solution>((?:(?!</?solution>).)*)</solution>((?:(?!</?solution>).)*)",
        transcript,
        re.DOTALL,
    )
    if parts is None or re.search(r"(?i)</?(?:think|sql|observation)\b", parts[2]):
        return -1.0
    if re.search(r"(?s)<think>.*</think>", transcript) is None:
        return -1.0
    if re.search(r"(?i)</observation>(?!\s*<think>)", parts[1]):
        return -1.0
    rows = []
    for query in (parts[2].strip(), gold):
        connection = sqlite3.connect(database)
        try:
            rows.append(frozenset(connection.execute(query).fetchall()))
        except sqlite3.Error:
            return 0.0
        finally:
            connection.close()
    return float(rows[0] == rows[1] and bool(rows[1]))


async def compare(quick: bool) -> AsyncIterator[Compared]:
    """Compare every case; `quick` changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "shop.sqlite"
        with sqlite3.connect(database) as connection:
            connection.execute("CREATE TABLE employees (id INTEGER PRIMARY KEY, name TEXT, salary INTEGER)")
            connection.execute("INSERT INTO employees VALUES (1, 'John Doe', 100), (2, 'Jane Smith', 200)")
        connection.close()
        options = {"root": folder, "compare": "set", "format": "skyrl", "reward_empty_gold": False}
        for turns, gold, stated in CASES:
            transcript = "\n\n<observation>rows</observation>\n\n".join(turns)
            ours = await score("skyrl_sql", turns, {"sql": gold, "db_path": "shop.sqlite"}, sql=options)
            yield Compared("sql", repr(turns)[:120], ours, skyrl_says(transcript, gold, database), stated)
    # Spider's evaluation compares the order of rows only where the gold query asks for one.
    for query, ordered in ((f"{GOLD} ORDER BY id", 1.0), (f"{GOLD} /* no ORDER BY here */", 0.0)):
        yield Compared("sql", f"ordered: {query}", float(is_ordered(query)), ordered)
