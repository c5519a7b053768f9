"""`GatheredRows`: rows of conversations that end at about the same time are written to TransferQueue together.

verl's agent-loop worker writes the rows of each conversation by themselves, with several round trips between processes
each time. Where many conversations end together, as at the end of a batch, their rows wait for each other:

    conversation ──▶ waiting rows ──▶ one write at a time, of all rows that wait ──▶ each conversation goes on

A row that comes alone is written at once.

Invariants:
- a conversation goes on when its own rows are written, and raises what its own rows raise: where a write of several
  conversations fails, each is written by itself;
- rows of different columns, or of two partitions, are never written together: TransferQueue takes one set of columns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from verl_multiturn.tasks import keep
from verl_multiturn.verl_bridge.compat.stored_rows import put_rows

_MOST = 64
"""Most conversations whose rows are written together: what prepares them holds up the event loop."""


@dataclass(frozen=True, eq=False)
class _Write:
    """The rows of one conversation."""

    keys: Sequence[str]
    fields: Sequence[Mapping[str, Any]]
    """The columns of each row."""
    tags: Sequence[Mapping[str, Any]]
    partition_id: str
    kind: Hashable
    """What rows that are written together have in common."""
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class GatheredRows:
    """The rows that the conversations of one worker write, in the place of TransferQueue's module."""

    def __init__(self) -> None:
        self._waiting: list[_Write] = []
        self._writing = False

    async def async_kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Sequence[Mapping[str, Any]],
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the rows of a conversation, as TransferQueue's function does; `fields` has the columns of each row."""
        columns = dict.fromkeys(tuple(sorted(each)) for each in fields)
        own = _Write(keys, fields, tags, partition_id, (partition_id, *columns))
        self._waiting.append(own)
        if not self._writing:
            self._writing = True
            keep(asyncio.ensure_future(self._write()))
        await own.written

    async def _write(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                kinds: dict[Hashable, list[_Write]] = defaultdict(list)
                for each in taken:
                    kinds[each.kind].append(each)
                for together in kinds.values():
                    await _put(together)
        finally:
            self._writing = False


async def _put(writes: Sequence[_Write]) -> None:
    try:
        await put_rows(
            [key for each in writes for key in each.keys],
            writes[0].partition_id,
            [row for each in writes for row in each.fields],
            [tag for each in writes for tag in each.tags],
        )
    except Exception as error:  # whatever it is, it goes to the conversation whose rows it is about
        if len(writes) > 1:
            for each in writes:
                await _put([each])
        elif not writes[0].written.done():
            writes[0].written.set_exception(error)
        return
    for each in writes:
        if not each.written.done():  # its conversation may be cancelled
            each.written.set_result(None)


def gathering(method: Callable[..., Any], rows: GatheredRows) -> Callable[..., Any]:
    """Return a method of verl's worker that writes rows, made to hand them to `rows`; verl's own stays as it is.

    Args:
        method: The method, which writes with `tq.async_kv_batch_put(…, fields=list_of_dict_to_tensordict(…))`.
        rows: Where its rows go.
    """
    inner: Any = inspect.unwrap(method)  # Ray wraps the methods of an actor's class, for its tracing
    names = {**inner.__globals__, "tq": rows, "list_of_dict_to_tensordict": list}
    made = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made
