"""`SqlTool`: SQL queries to a SQLite database, which no query can change.

Each conversation has one database, which the row's `create_kwargs` name in one of two ways:
- `db_path`: a file under `root`;
- `db_id`: is `root/<db_id>/<db_id>.sqlite`, `root/<db_id>.sqlite`, or the same with `.db`.

Invariants:
- a query runs in another process (`processes/sql_worker.py`). Only a kill stops SQLite while it compiles a query (1,500
  characters of nested WITH keep it busy for hours) or while one function runs;
- that process is killed when the query is late or the call is cancelled, and is otherwise used again; no process
  outlives the last conversation of its event loop;
- no path leads out of `root`, be it through `..`, an absolute path or a link.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.config import fixed, read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.pool import WorkerError, WorkerPool
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema

_HEADER = b"SQLite format 3\0"
_WORKER = Path(__file__).parents[1] / "processes" / "sql_worker.py"
# Seconds beyond `timeout_s` before the kill: a worker that stops its query by itself can be used again.
_KILL_AFTER_S = 1.0


class SqlSettings(BaseModel):
    """Settings of the SQL tool, each with its default and meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    GONE: ClassVar = fixed(cell_characters=200)

    root: Path
    """Folder of the databases. They must not change during the run: SQLite ignores a journal beside a database."""

    timeout_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    """Seconds that one query may take."""

    max_rows: int = Field(50, gt=0)
    """Rows of one answer that the model reads; a note follows when there are more."""

    max_characters: int = Field(10_000, ge=100, le=1_000_000)
    """Characters of one answer's table."""

    max_memory_mb: int = Field(256, ge=64)
    """Memory of one process; the rows that a query sorts or makes unique have to fit."""

    processes: int = Field(4, gt=0)
    """Largest number of queries at once in one worker process; further queries wait."""


class SqlTool(BaseTool):
    """The tool `sql(query)`.

    Args:
        config: The fields of `SqlSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong, or `root` is not a folder.
    """

    pure = True
    repeatable = True

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._settings = read_model(SqlSettings, config, "config")
        if not self._settings.root.is_dir():
            raise ConfigError(
                f"config.root: {str(self._settings.root)!r} is no folder; give the folder of the databases"
            )
        self._root = self._settings.root.resolve()
        self._databases: dict[str, Path] = {}
        self._workers = PerLoop(WorkerPool.close, counted=True)

    def get_schema(self) -> ToolSchema:
        """Return the schema: one argument, `query`, a statement that only reads."""
        query = {"type": "string", "description": "One SELECT statement in SQLite's dialect."}
        return ToolSchema.read(
            {
                "type": "function",
                "function": {
                    "name": "sql",
                    "description": "Query the database. `SELECT name, sql FROM sqlite_master` lists its tables.",
                    "parameters": {"type": "object", "properties": {"query": query}, "required": ["query"]},
                },
            },
            "SqlTool",
        )

    async def create(
        self, instance_id: str, *, db_path: str | None = None, db_id: str | None = None, **kwargs: Any
    ) -> None:
        """Find the row's database.

        Args:
            instance_id: Id of the conversation.
            db_path: Path of the database, relative to `root` or absolute; or give `db_id`.
            db_id: Name of the database.
            kwargs: Not used.

        Raises:
            ConfigError: There is no such database under `root`.
        """
        self._workers.enter(instance_id)
        self._databases[instance_id] = find_database(self._root, db_path, db_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a query, and return its rows as a table.

        Raises:
            ValueError: SQLite refuses the query (the text is SQLite's), or the query took too long or too much memory.
        """
        request = {"path": str(self._databases[instance_id]), "query": parameters["query"]}
        try:
            answer = await self._workers.get(self._open_workers).ask(request)
        except TimeoutError:
            answer = {"late": True}
        except WorkerError:
            answer = {"error": "the query ended the database's process; ask for less"}
        if "late" in answer:
            raise ValueError(f"the query was stopped after {self._settings.timeout_s:g} s; ask for less")
        if "error" in answer:
            raise ValueError(answer["error"])
        return ToolResponse(answer["text"]), 0.0, {"rows": answer["rows"]}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation; the last one on the event loop ends the processes."""
        self._databases.pop(instance_id, None)
        await self._workers.leave(instance_id)

    def _open_workers(self) -> WorkerPool:
        return open_workers(self._settings)


def open_workers(settings: SqlSettings, queries: int = 1) -> WorkerPool:
    """Return a pool of processes that run queries for one event loop.

    Args:
        settings: The limits of a query.
        queries: Number of queries that one request runs.
    """
    limits = {
        "timeout_s": settings.timeout_s,
        "max_rows": settings.max_rows,
        "max_characters": settings.max_characters,
        "max_memory_bytes": settings.max_memory_mb * 2**20,
    }
    kill_s = queries * settings.timeout_s + _KILL_AFTER_S
    return WorkerPool(_WORKER, limits, timeout_s=kill_s, processes=settings.processes, python=("-I", "-S"))


def find_database(root: Path, db_path: str | None, db_id: str | None) -> Path:
    """Return the path of the database that a row names.

    Args:
        root: Folder of the databases, an absolute path without links.
        db_path: Path of the database, relative to `root` or absolute; None where `db_id` is given.
        db_id: Name of the database; None where `db_path` is given.

    Raises:
        ConfigError: Both or neither are given, there is no such file, it lies outside of `root`, or it is not a SQLite
            database.
    """
    if (db_path is None) == (db_id is None):
        raise ConfigError(
            f"create_kwargs: expected either 'db_path' or 'db_id', got db_path={db_path!r}, db_id={db_id!r}"
        )
    given = f"create_kwargs.{'db_path' if db_id is None else 'db_id'}: {db_path if db_id is None else db_id!r}"
    if db_path is not None:
        names = [db_path]
    else:
        names = [f"{stem}{suffix}" for suffix in (".sqlite", ".db") for stem in (f"{db_id}/{db_id}", db_id)]
    try:
        resolved = [(root / name).resolve() for name in names]
        found = next((path for path in resolved if path.is_file()), None)
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a name that is too long, or links in a circle
        raise ConfigError(f"{given} is no path: {error}") from None
    if found is None:
        raise ConfigError(f"{given} is no file under {str(root)!r}; mend the data row or `root`")
    if not found.is_relative_to(root):
        raise ConfigError(f"{given} leads out of {str(root)!r}; mend the data row or `root`")
    with open(found, "rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            raise ConfigError(f"{given} is no SQLite database")
    return found
