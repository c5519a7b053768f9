"""`Table`: the conversations of all indices, filtered, sorted and cut into pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.errors import ConfigError
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.index.query import Term, mask_of
from verl_multiturn.records.index.rows import SCHEMA

_FIRST = 2_000
"""Rows up to which a page is chosen, without a sort of all."""
_ORDERS = 4
"""Sorted orders that are kept for the next page."""


class Table:
    """The conversations of all folders, filtered, sorted and cut into pages.

    Args:
        indices: An index for each folder.
    """

    def __init__(self, indices: Iterable[Index]) -> None:
        self.indices = list(indices)
        self._state: tuple[int, ...] | None = None
        self._whole = SCHEMA.empty_table()
        self._batches: list[pa.RecordBatch] = []
        self._starts: list[int] = []
        self._orders: dict[tuple[Any, ...], pa.Array] = {}

    @property
    def whole(self) -> pa.Table:
        """Return all rows, with the number of their folder in the column `dir`."""
        state = tuple(index.version for index in self.indices)
        if state != self._state:
            tables = [
                index.table.append_column("dir", pa.array([number] * len(index), pa.int8()))
                for number, index in enumerate(self.indices)
            ]
            self._whole, self._state, self._orders = pa.concat_tables(tables), state, {}
            self._batches = self._whole.to_batches()
            self._starts = np.concatenate([[0], np.cumsum([len(batch) for batch in self._batches])]).tolist()
        return self._whole

    def select(self, terms: list[Term]) -> pa.Table:
        """Return the rows that hold all terms.

        Raises:
            ConfigError: A term does not fit.
        """
        mask = mask_of(self.whole, terms)
        return self.whole if mask is None else self.whole.filter(mask)

    def page(
        self, terms: list[Term], sort: str, descending: bool, offset: int, limit: int
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many rows hold all terms, and a page of them.

        Args:
            terms: The conditions that they must fulfil.
            sort: Column by which they are sorted; rows with equal values stay in the order of their begin.
            descending: Whether the largest come first. Rows without a value come last either way.
            offset: Number of rows before the page.
            limit: Most rows of the page.

        Raises:
            ConfigError: A term does not fit, or there is no such column.
        """
        whole = self.whole
        if sort not in whole.column_names:
            raise ConfigError(f"the table is sorted by {sort!r}; expected one of {', '.join(whole.column_names)}")
        key = (tuple(terms), sort, descending)
        if (found := self._orders.get(key)) is None:
            mask = mask_of(whole, terms)
            rows = pa.array(np.arange(len(whole)) if mask is None else pc.indices_nonzero(mask).to_numpy())
            order = "descending" if descending else "ascending"
            keys = pa.table({"value": whole[sort] if mask is None else whole[sort].filter(mask), "row": rows})
            if offset + limit <= _FIRST:  # a sort of all takes longer, and often only the first page is read
                best = pc.select_k_unstable(keys, offset + limit, sort_keys=[("value", order), ("row", "ascending")])
                return len(rows), self._rows(rows.take(best)[offset:])
            found = rows.take(pc.sort_indices(keys["value"], sort_keys=[("", order)]))
            while len(self._orders) >= _ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = found
        return len(found), self._rows(found.slice(offset, limit))

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Return the row of a conversation; None: there is none."""
        found = pc.index(self.whole["request_id"], request_id).as_py()
        return None if found < 0 else self._rows(pa.array([found]))[0]

    def _rows(self, numbers: pa.Array) -> list[dict[str, Any]]:
        """Return rows by their numbers. A `take` of so few would copy whole columns of text first."""
        made = []
        for number in numbers.to_pylist():
            part = int(np.searchsorted(self._starts, number, side="right")) - 1
            made += self._batches[part].slice(number - self._starts[part], 1).to_pylist()
        return made
