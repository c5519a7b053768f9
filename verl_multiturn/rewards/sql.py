"""The reward for text to SQL: a query is right when it has the result of the gold query (execution match).

As in SkyRL-SQL, the answer is the text in `<solution>…</solution>`. A ```sql block in it, or instead of it, is accepted
too. `format: skyrl` is exactly the format of SkyRL-SQL (see `skyrl_query`), and `compare: set` its comparison.

Both queries run in a process of `processes/sql_worker.py`: read-only, on one database, with limits of time and memory.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_multiturn.chat.model_text import last_tag
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.pool import WorkerPool
from verl_multiturn.rewards.answers import THINK, has_one, last_block
from verl_multiturn.rewards.resources import shared
from verl_multiturn.rewards.score import RewardOptions, Score, Solution, TruthError
from verl_multiturn.rewards.verifiers import judge_or_blame
from verl_multiturn.tools.sql import SqlSettings, find_database, open_workers

_MOST_CHARACTERS = 100_000


class SqlOptions(RewardOptions):
    """Options of the reward `sql`."""

    root: Path | None = None
    """Folder of the databases, as for the `sql` tool; required."""

    compare: Literal["multiset", "set"] = "multiset"
    """Comparison of the two results. In both kinds, columns must be in the gold query's order.

    multiset: equal rows are counted, and the order of rows matters where the gold query has an ORDER BY of its own, as
    in Spider's evaluation (arXiv 1809.08887). set: neither the number of equal rows nor the order matters, as in BIRD
    (arXiv 2305.03111) and SkyRL-SQL.
    """

    format: Literal["solution", "skyrl"] = "solution"
    """Format that is requested.

    solution: one `<solution>…</solution>` in the last turn. skyrl: SkyRL-SQL's format and reward, which is -1 for a
    conversation that breaks the format, whatever its query is worth, else 1 or 0.
    """

    reward_empty_gold: bool = True
    """True: a query without rows is right when the gold query has none.

    Then any query without rows is right. SkyRL-SQL has used False since its issue 2451.
    """

    timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds for each of the two queries."""

    max_memory_mb: int = Field(default=512, ge=64)
    """Memory of one process, which holds the rows of both queries, in megabytes."""

    processes: int = Field(default=2, gt=0)
    """Comparisons at once in each of verl's reward workers; further ones wait."""


class _Gold(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    sql: str
    db_id: str | None = None
    db_path: str | None = None


async def reward(solution: Solution, ground_truth: Any, options: SqlOptions) -> Score:
    """Score whether the query of a conversation has the result of the gold query.

    Args:
        solution: The conversation; the query is in its last turn (with `format: skyrl` in any turn).
        ground_truth: `{"sql": the gold query}` with `db_id` or `db_path`, as in the `sql` tool's `create_kwargs`, or
            JSON text of it.
        options: Options of this reward.

    Raises:
        ConfigError: `root` is missing, the ground truth has another form, or there is no such database.
        TimeoutError: The query took too long.
        WorkerError: The query ended the process.
        TruthError: The gold query itself fails or is late.
        OutageError: The process ends whatever the query is.
    """
    gold, database = _read(ground_truth, solution.data_source, options)
    if options.format == "skyrl":
        found, formatted = skyrl_query(solution.texts), True
        if found is None:
            return Score(-1.0, answered=float(any("<solution>" in text for text in solution.texts)))
        query = _without_semicolon(found)
    else:
        query, formatted = _query_of(solution.answer), has_one(solution.answer, "solution")
    if not query:
        return Score(format=float(formatted))
    if len(query) > _MOST_CHARACTERS:
        return Score.of(False, formatted)
    compare = "list" if options.compare == "multiset" and is_ordered(gold.sql) else options.compare
    request = {"path": str(database), "query": query, "gold": gold.sql, "compare": compare}
    pool = shared(("sql", options), lambda: _open(options))
    answer = await judge_or_blame(lambda: pool.ask(request), lambda: pool.ask({**request, "query": gold.sql}))
    if "late" in answer:
        raise TimeoutError
    if "gold_error" in answer:
        raise TruthError(f"the gold query {gold.sql!r} fails: {answer['gold_error']}")
    counts = options.reward_empty_gold or answer.get("gold_rows") != 0
    return Score.of(answer.get("match") is True and counts, formatted)


def is_ordered(query: str) -> bool:
    """Return whether a query has an ORDER BY of its own, not within a subquery, a window, a string or a comment."""
    # Imported here, since the import takes half a second that other rewards need not wait.
    from sqlglot import TokenType, tokenize
    from sqlglot.errors import TokenError

    try:
        tokens = tokenize(query, read="sqlite")
    except TokenError:
        return False  # such a query fails anyway
    depth, outer = 0, []
    for token in tokens:
        depth += {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(token.token_type, 0)
        if depth == 0 and token.token_type not in (TokenType.STRING, TokenType.IDENTIFIER):
            outer.append(token.text.upper())
    return re.search(r"\bORDER\s+BY\b", " ".join(outer)) is not None


def skyrl_query(texts: Sequence[str]) -> str | None:
    """Return the query of a conversation in SkyRL-SQL's format; None when the conversation breaks the format.

    The format is that of `skyrl_gym/envs/sql/utils.py` in NovaSky-AI/SkyRL. Its rules are about all turns together:
    - there is one `<solution>`, closed once, without tags of other sections in it;
    - there is at least one `<think>…</think>`;
    - before the solution, each turn after an observation begins with `<think>`. Reasoning that the chat template opened
      lacks its `<think>` in the texts, and is accepted.

    Args:
        texts: The assistant's texts, one for each turn.
    """
    whole = "".join(texts)
    before, opened, after = whole.partition("<solution>")
    query, closed, rest = after.partition("</solution>")
    if not opened or not closed or "<solution>" in after or "</solution>" in rest:
        return None
    if re.search(r"</?(?:think|sql|observation)\b", query, re.IGNORECASE):
        return None
    if THINK[1] not in whole:
        return None
    # A single text for all turns holds the tools' answers as well, within <observation> tags.
    after_observations = re.split("</observation>", before, flags=re.IGNORECASE)[1:]
    start = 0
    for text, following in itertools.pairwise(texts):
        start += len(text)
        if start <= len(before):
            after_observations.append(before[start : start + len(following)])
    return query.strip() if all(map(_begins_with_thought, after_observations)) else None


def _begins_with_thought(text: str) -> bool:
    opening, closing = THINK
    head, closed, _ = text.partition(closing)
    return text.lstrip().lower().startswith(opening) or (bool(closed) and opening not in head)


def _query_of(text: str) -> str:
    tagged = last_tag(text, "solution")
    block = last_block(text if tagged is None else tagged, ("sql", "sqlite"))
    return _without_semicolon(block if block is not None else tagged or "")


def _without_semicolon(query: str) -> str:
    return query.strip().rstrip(";").rstrip()


def _read(ground_truth: Any, data_source: str, options: SqlOptions) -> tuple[_Gold, Path]:
    if options.root is None or not options.root.is_dir():
        given = None if options.root is None else str(options.root)
        raise ConfigError(f"reward_kwargs.sql.root: expected the folder of the databases, got {given!r}")
    try:
        raw = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        gold = _Gold.model_validate(raw)
    except (ValidationError, ValueError):
        raise ConfigError(
            f"ground_truth of {data_source!r}: expected {{'sql': …}} with 'db_id' or 'db_path', got "
            f"{ground_truth!r}; mend the row"
        ) from None
    return gold, find_database(options.root.resolve(), gold.db_path, gold.db_id)


def _open(options: SqlOptions) -> WorkerPool:
    limits = options.model_dump(include={"root", "timeout_s", "max_memory_mb", "processes"})
    return open_workers(SqlSettings.model_validate(limits), queries=2)
