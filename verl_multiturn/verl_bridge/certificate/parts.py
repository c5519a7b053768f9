"""The processes in which a large batch is checked: Ray actors, each with a part of the rows.

    trainer   its knowledge of each row ─▶ parts        equal slices of the batch, in its order
    parts     fetch the columns from TransferQueue, check each row                                  part.py
    trainer   waits for the verdict on each row, and asks the rest of all rows together             trainer/verify.py
      ↓ no update before
    parts     hand over the columns that the records need, while verl updates

Invariants:
- nothing is read before the advantages are there. A column that was read while verl computes the old log-probs could
  change before the update, and reading costs more than checking. So each column is read once, right before the update;
- a batch is trained only if every part has given exactly one verdict on each of its rows. A part that dies, that fails,
  that hangs, or that gives fewer verdicts or others ends the run (`CertificateError`). None gets a second try;
- the processes reserve no logical CPU of Ray, import neither verl nor builders of a batch, and end with the trainer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import CertificateError
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.certificate.part import Fields, RowVerdict, Rules, TrainerRow, check_rows

LARGE = 1024
"""Rows from which a batch is checked in parts. A smaller one takes the trainer itself some tenths of a second."""
_MOST = 8
"""The most processes: as many as TransferQueue has storage units by default."""
HUNG_S = 900.0
"""Seconds after which a part hangs. TransferQueue itself gives a storage unit up after three times 200 s."""


class FetchedColumns(NamedTuple):
    """Columns of rows that were fetched for the certificate."""

    keys: Set[RowKey]
    """The rows."""
    get: Callable[[], Mapping[RowKey, Fields]]
    """Returns the columns of each of them; also in another thread."""


class CertificatePart:
    """The code of the actors."""

    def __init__(self) -> None:
        self._kept: list[Fields] = []

    def check(
        self, rows: Sequence[TrainerRow], partition_id: str, rules: Rules, further: Sequence[str]
    ) -> list[RowVerdict]:
        """Check rows as `check_rows` does, and keep their columns for `columns`."""
        verdicts, self._kept = check_rows(rows, partition_id, rules, further)
        return verdicts

    def columns(self) -> list[Fields]:
        """Return the columns that were kept of each row that was checked last, and forget them."""
        kept, self._kept = self._kept, []
        return kept


class Parts:
    """The processes of a trainer.

    Args:
        count: Number of processes; None: one for each core, up to eight.
        hung_s: Seconds after which a part hangs.
        of: The code of the actors.
    """

    def __init__(self, count: int | None = None, hung_s: float = HUNG_S, of: type = CertificatePart) -> None:
        self._count = min(_MOST, len(os.sched_getaffinity(0))) if count is None else count
        self._hung_s, self._of = hung_s, of
        self._actors: list[Any] = []

    def start(self) -> None:
        """Start the processes where there are none. The first wait for them is at the first batch."""
        if not self._actors:
            remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(self._of)
            self._actors = [remote.remote() for _ in range(self._count)]

    def are_worth(self, rows: int) -> bool:
        """Return whether a batch of so many rows is checked faster in parts."""
        return rows >= LARGE and self._count > 1 and ray.is_initialized()

    def check(
        self, rows: Sequence[TrainerRow], partition_id: str, rules: Rules, further: Sequence[str]
    ) -> tuple[list[RowVerdict], FetchedColumns]:
        """Check rows as `check_rows` does, in parts.

        Args:
            rows: See `check_rows`, as for the rest.
            partition_id: See `check_rows`.
            rules: See `check_rows`.
            further: See `check_rows`.

        Raises:
            CertificateError: A part did not give its verdicts, or others than those requested.
        """
        self.start()
        count = len(self._actors)
        slices = [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]
        asked = [(actor, own) for actor, own in zip(self._actors, slices, strict=True) if own]
        answers = [actor.check.remote(own, partition_id, rules, further) for actor, own in asked]
        given = self._wait(answers, [own for _, own in asked])
        keys = [row.key for row in rows]
        kept = [actor.columns.remote() for actor, _ in asked]

        def columns() -> dict[RowKey, Fields]:
            parts = ray.get(kept, timeout=self._hung_s)
            return dict(zip(keys, [fields for part in parts for fields in part], strict=True))

        return [verdict for own in given for verdict in own], FetchedColumns(frozenset(keys), columns)

    def _wait(self, answers: Sequence[Any], asked: Sequence[Sequence[TrainerRow]]) -> list[list[RowVerdict]]:
        """Return the verdicts of all parts, once each has given them."""
        given: dict[Any, list[RowVerdict]] = {}
        until = time.monotonic() + self._hung_s
        while late := [answer for answer in answers if answer not in given]:
            come, _ = ray.wait(late, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not come:
                number = answers.index(late[0])
                raise _fault(number, asked, f"has not answered for {self._hung_s:g} s")
            (answer,) = come
            number = answers.index(answer)
            try:
                given[answer] = ray.get(answer)
            except RayError as error:
                raise _fault(number, asked, f"failed: {describe(error)}") from error
            if (wrong := _difference(asked[number], given[answer])) is not None:
                raise _fault(number, asked, wrong)
        return [given[answer] for answer in answers]


def _difference(asked: Sequence[TrainerRow], given: Any) -> str | None:
    """Return how an answer differs from one verdict on each row, in order; None: it does not."""
    keys = [row.key for row in asked]
    if not isinstance(given, list) or not all(isinstance(verdict, RowVerdict) for verdict in given):
        return f"answered with what is no list of verdicts: {show(given)}"
    if (judged := [verdict.key for verdict in given]) == keys:
        return None
    return (
        f"answered with {len(judged)} verdicts, on {len(set(judged) & set(keys))} of its rows and "
        f"{len(set(judged) - set(keys))} others"
    )


def _fault(number: int, asked: Sequence[Sequence[TrainerRow]], what: str) -> CertificateError:
    rows = asked[number]
    return CertificateError(
        f"part {number + 1} of {len(asked)} of the certificate, with the {len(rows)} rows from {rows[0].key} to "
        f"{rows[-1].key}, {what}; the batch is not trained on"
    )
