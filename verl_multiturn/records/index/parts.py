"""`RowParts`: the rows of an index, in parts, of which only those that change are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.records.index import cache
from verl_multiturn.records.index.joins import GIVEN, WHOLE, otherwise_scored, without_invalid
from verl_multiturn.records.index.rows import COLUMNS, SCHEMA, Row, is_again, merge, table_of


class RowParts:
    """The rows of an index; each conversation has one.

    Args:
        tables: The first parts, as `tables` of another one has them.
    """

    def __init__(self, tables: Iterable[pa.Table] = ()) -> None:
        self.tables: list[pa.Table] = list(tables)

    def __len__(self) -> int:
        return sum(len(part) for part in self.tables)

    @property
    def table(self) -> pa.Table:
        """Return all rows, those begun first first."""
        return pa.concat_tables(self.tables) if self.tables else SCHEMA.empty_table()

    def put(self, changed: dict[str, Row], note_again: Callable[[Mapping[str, Any], Row], None]) -> list[str]:
        """Put changed conversations among the parts, and return the groups that they are of.

        Args:
            changed: Of each conversation a value for each column; None: it stays.
            note_again: It is called with a row and changes of it that another file has; they are omitted.
        """
        ids = pa.array(changed, pa.string())
        for place, part in enumerate(self.tables):
            known = pc.is_in(part["request_id"], ids)
            if pc.any(known).as_py():
                for row in part.filter(known).to_pylist():
                    before, new = list(row.values()), changed[row["request_id"]]
                    if is_again(before, new):
                        note_again(row, new)
                    else:
                        merge(before, new)
                    changed[row["request_id"]] = before
                self.tables[place] = part.filter(pc.invert(known))
        self.tables = [part for part in self.tables if len(part)]
        made = without_invalid(table_of(list(changed.values())))
        self._append(made)
        return made["uid"].to_pylist()  # type: ignore[no-any-return]

    def put_joined(self, joined: pa.Table) -> list[str]:
        """Put a join's data of conversations among the parts.

        Args:
            joined: Rows of `joins.joined`; of a conversation that is there twice, the first counts.

        Returns:
            The request ids of those of which the join has another score than their lines.
        """
        otherwise: list[str] = []
        rest = pa.array([True] * len(joined), pa.bool_())
        for place, part in enumerate(self.tables):
            at = pc.index_in(part["request_id"], joined["request_id"])
            known = pc.is_valid(at)
            if not pc.any(known).as_py():
                continue
            otherwise += otherwise_scored(part, joined["score"].take(at), joined[WHOLE].take(at))
            rest = pc.and_(rest, pc.invert(pc.is_in(joined["request_id"], part["request_id"])))
            for name in GIVEN:
                values = pc.if_else(known, joined[name].take(at), part[name]).combine_chunks()
                part = part.set_column(part.schema.get_field_index(name), SCHEMA.field(name), values)
            self.tables[place] = without_invalid(part)
        alone = joined.filter(rest)
        if len(alone):
            ids = alone["request_id"].combine_chunks()
            alone = alone.take(pc.unique(pc.index_in(ids, ids)))
            self._append(widened(alone))
        return otherwise

    def put_scores(self, scores: Mapping[str, float]) -> bool:
        """Put the rewards of a gateway's lines among the parts, also where a join gave one; return whether any changed.

        Args:
            scores: The reward of each session that has one, by request id.
        """
        ids, values = pa.array(scores, pa.string()), pa.array(scores.values(), pa.float64())
        changed = False
        for place, part in enumerate(self.tables):
            at = pc.index_in(part["request_id"], ids)
            given = pc.if_else(pc.is_valid(at), values.take(at.combine_chunks()), part["score"]).combine_chunks()
            new = without_invalid(part.set_column(part.schema.get_field_index("score"), SCHEMA.field("score"), given))
            if not new["score"].equals(part["score"]):
                self.tables[place], changed = new, True
        return changed

    def missing(self, request_ids: Collection[str]) -> list[str]:
        """Return those of some request ids that have no row."""
        rest = pa.array(request_ids, pa.string())
        for part in self.tables:
            rest = rest.filter(pc.invert(pc.is_in(rest, part["request_id"].combine_chunks())))
        return rest.to_pylist()  # type: ignore[no-any-return]

    def mark_undone(self, numbers: Collection[int]) -> None:
        """Mark the conversations whose step a later start undid.

        Args:
            numbers: The joins of these steps, as the column `join` has them.
        """
        column = SCHEMA.get_field_index("undone")
        for place, part in enumerate(self.tables):
            undone = pc.is_in(part["join"], pa.array(numbers, part["join"].type))
            if not undone.equals(part["undone"]):
                self.tables[place] = part.set_column(column, SCHEMA.field("undone"), undone)

    def _append(self, table: pa.Table) -> None:
        if self.tables and len(self.tables[-1]) + len(table) <= cache.ROWS:
            table = pa.concat_tables([self.tables.pop(), table]).combine_chunks()
        self.tables.append(table)


def widened(joined: pa.Table) -> pa.Table:
    """Return rows of `joins.joined` as rows of the index, which knows nothing else of their conversations."""
    columns = [joined[name] if name in joined.column_names else pa.nulls(len(joined), kind) for name, kind in COLUMNS]
    return pa.table(columns, SCHEMA)
