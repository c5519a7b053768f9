"""Worker process that runs SQL for `sql.py` and `rewards/sql.py`, started as `python -I -S sql_worker.py LIMITS`.

It imports the standard library only. Its standard input and output are a socket, over which it reads requests and
writes answers, one JSON object a line. It writes `{}` when it is ready, and ends when the socket is closed.

Requests and their answers:
- `{"path", "query"}`: `{"text", "rows"}`, a table and its number of rows;
- `{"path", "query", "gold", "compare"}`: `{"match", "gold_rows"}`, whether both queries have the same result, and the
  number of rows of the gold query; or `{"gold_error"}` where the gold query fails. The rows stay in this process;
- any request: `{"error"}` where the query fails, `{"late"}` where it takes too long.

An answer with `"worn": true` asks the parent not to use this process again.

Invariants:
- SQLite reads one file, and nothing is written: the file is opened read-only and immutable, an authorizer allows only
  SELECT, columns, and the functions and pragmas listed here, and the process may not write a byte to any file;
- each query has a connection of its own;
- memory, time, rows and characters are bounded; the parent kills the process where these bounds do not help (a query
  whose compilation never ends).
"""

import contextlib
import json
import resource
import socket
import sqlite3
import sys
import time
from collections import Counter
from urllib.parse import quote

_OPCODES_BETWEEN_CHECKS = 10_000
# Characters of one cell that the model reads.
_CELL_CHARACTERS = 200
# SQLite's own limits, far above the needs of an honest query and far below those of an attack.
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 250_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# The allowed functions: none of them loads, writes, logs, shows how this SQLite was built, or has a random value.
_FUNCTION_NAMES = """
-> ->> abs acos acosh asin asinh atan atan2 atanh avg bm25 ceil ceiling char coalesce concat concat_ws cos cosh count
cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value floor format
glob group_concat hex highlight ifnull iif instr json json_array json_array_length json_extract json_group_array
json_group_object json_insert json_object json_patch json_quote json_remove json_replace json_set json_type json_valid
julianday lag last_value lead length like likelihood likely ln log log10 log2 lower ltrim match matchinfo max min mod
nth_value ntile nullif octet_length offsets percent_rank pi pow power printf quote radians rank replace round row_number
rtrim sign sin sinh snippet soundex sqrt strftime string_agg substr substring sum tan tanh time timediff total trim
trunc typeof unhex unicode unixepoch unlikely upper zeroblob
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
# The allowed pragmas. Full-text tables themselves ask for data_version.
_PRAGMAS = frozenset(
    {
        "data_version",
        "foreign_key_list",
        "index_info",
        "index_list",
        "index_xinfo",
        "table_info",
        "table_list",
        "table_xinfo",
    }
)

_TABLE_FUNCTIONS = ("json_each", "json_tree", *(f"pragma_{name}" for name in sorted(_PRAGMAS - {"data_version"})))


def _authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _restrict(connection: sqlite3.Connection, deadline: float) -> None:
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    # Keep rows that are sorted or made unique in memory, which is limited; this process can write no file anyway.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    # SQLite sets up a virtual table at its first use, which looks like writing to the authorizer. So use each one now.
    virtual = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'"
    for name in (*_TABLE_FUNCTIONS, *(row[0] for row in connection.execute(virtual).fetchall())):
        quoted = name.replace('"', '""')
        with contextlib.suppress(sqlite3.Error):  # this SQLite does not know it
            connection.execute(f'SELECT * FROM "{quoted}" LIMIT 0')
    connection.set_authorizer(_authorize)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _OPCODES_BETWEEN_CHECKS)


def _show(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    text = str(value)
    text = text if len(text) <= _CELL_CHARACTERS else f"{text[:_CELL_CHARACTERS]}…[{len(text)} characters]"
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("|", "\\|")


def _table(cursor: sqlite3.Cursor, limits: dict[str, int]) -> dict[str, object]:
    """Return as many rows as the limits allow, as a table with ` | ` between cells, and their number."""
    lines = [" | ".join(_show(column[0]) for column in cursor.description or ())]
    length, more = len(lines[0]), False
    for row in cursor:
        line = " | ".join(_show(cell) for cell in row)
        length += len(line) + 1
        if len(lines) > limits["max_rows"] or length > limits["max_characters"]:
            more = True
            break
        lines.append(line)
    rows = len(lines) - 1
    lines[0] = lines[0][: limits["max_characters"]]
    counted = f"{rows} row{'' if rows == 1 else 's'}"
    lines.append(f"(the first {counted}; there are more)" if more else f"({counted})")
    return {"text": "\n".join(lines), "rows": rows}


def _fetch(request: dict[str, str], key: str, limits: dict[str, int]) -> tuple[int, list[tuple[object, ...]]]:
    """Return the number of columns and the rows of the query `request[key]`, which has the whole time limit."""
    uri = f"file:{quote(request['path'])}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        _restrict(connection, time.monotonic() + limits["timeout_s"])
        cursor = connection.execute(request[key])
        return len(cursor.description or ()), cursor.fetchall()


def match(request: dict[str, str], limits: dict[str, int]) -> dict[str, object]:
    """Compare the results of two queries, `query` and `gold`: the number of columns, and the rows.

    `compare` in the request decides when the rows are the same. "set": each row of one is in the other, however often.
    "multiset": each row comes as often in both. "list": the order is the same, too.

    Args:
        request: The request, with `path`, `query`, `gold` and `compare`.
        limits: The limits of this process.

    Returns:
        The answer to the request.

    Raises:
        MemoryError: The query needs too much memory.
        sqlite3.Error: SQLite refuses the query; "interrupted" means that it took too long.
    """
    try:
        gold_columns, gold = _fetch(request, "gold", limits)
    except (MemoryError, sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
        return {"gold_error": str(error) or type(error).__name__, "worn": isinstance(error, MemoryError)}
    columns, rows = _fetch(request, "query", limits)
    as_kind = {"set": frozenset, "multiset": Counter, "list": list}[request["compare"]]
    # Two queries without rows can differ in their columns only.
    same = columns == gold_columns and as_kind(rows) == as_kind(gold)
    return {"match": same, "gold_rows": len(gold)}


def answer(request: dict[str, str], limits: dict[str, int]) -> dict[str, object]:
    """Return the answer to a request; an error is an answer, too.

    Args:
        request: The request.
        limits: The limits of this process.
    """
    if "gold" in request:
        try:
            return match(request, limits)
        except MemoryError:
            return {"error": "the query needs too much memory", "worn": True}
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
            return {"late": True} if str(error) == "interrupted" else {"error": str(error)}
    deadline = time.monotonic() + limits["timeout_s"]
    try:
        uri = f"file:{quote(request['path'])}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            _restrict(connection, deadline)
            return _table(connection.execute(request["query"]), limits)
    except MemoryError:
        # The memory that remains may be fragmented: this process must not be used again.
        return {"error": "the query needs too much memory; ask for less", "worn": True}
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
        return {"late": True} if str(error) == "interrupted" else {"error": str(error)}


def _limit(kind: int, value: int) -> None:
    """Set a soft limit of this process, at most to its hard limit, which stays as it is."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    """Answer requests until the parent closes the socket."""
    limits = json.loads(sys.argv[1])
    _limit(resource.RLIMIT_AS, limits["max_memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=0) as parent, parent.makefile("rwb") as stream:
        stream.write(b"{}\n")  # ready: the time of a query does not run while Python starts
        stream.flush()
        for line in stream:
            # Limit the processor time, too: nothing else ends this process if the parent dies while a query compiles.
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 2 * limits["timeout_s"]) + 5)
            stream.write(json.dumps(answer(json.loads(line), limits)).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
