"""`CorpusTool`: base of the tools that read a folder of documents in the worker itself; no server is needed.

Invariants:
- the tools of a process that name the same corpus share one index. It is loaded once, in a thread that the first
  conversation starts; the event loop is never blocked;
- an index that could not be built raises for each of its users.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.tools.base import BaseTool
from verl_multiturn.tools.bm25 import Bm25Index, corpus_files
from verl_multiturn.tools.schema import ToolSchema

# Indices that are loaded, or being loaded, as long as a tool holds them.
_loads: WeakValueDictionary[tuple[Path, Path | None], Future[Bm25Index]] = WeakValueDictionary()


class CorpusSettings(BaseModel):
    """Settings of every tool that reads a corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: Path
    """Folder of `.txt`, `.md` and `.jsonl` files, see `bm25.py`."""

    index_dir: Path | None = None
    """Folder of the indices; null: the user's cache directory. In a folder that all nodes share, one node builds it."""


class CorpusTool(BaseTool):
    """Base of a tool that answers from the index of a corpus.

    Args:
        settings: The settings of the corpus.
        config: As in `BaseTool`.
        tool_schema: As in `BaseTool`.

    Raises:
        ConfigError: The corpus has no files.
    """

    outage_limits = OutageLimits(mode="off")  # it answers in this process
    pure = True
    repeatable = True

    def __init__(self, settings: CorpusSettings, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._place = settings.corpus.absolute(), settings.index_dir and settings.index_dir.absolute()
        corpus_files(settings.corpus)  # raises at start-up if the path is wrong
        self._loading: Future[Bm25Index] | None = None

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Start to load the index, without waiting for it.

        Raises:
            ConfigError: An earlier load has ended, and the index could not be built.
        """
        loading = self._load()
        if loading.done():
            loading.result()

    async def _index(self) -> Bm25Index:
        """Return the index, once it is loaded.

        Raises:
            ConfigError: It could not be built.
        """
        return await asyncio.shield(asyncio.wrap_future(self._load()))

    def _load(self) -> Future[Bm25Index]:
        if self._loading is None:
            self._loading = _loads.get(self._place) or _begin_load(*self._place)
        return self._loading


def _begin_load(corpus: Path, index_dir: Path | None) -> Future[Bm25Index]:
    loading: Future[Bm25Index] = Future()
    _loads[corpus, index_dir] = loading

    def load() -> None:
        try:
            loading.set_result(Bm25Index.open(corpus, index_dir))
        except BaseException as error:  # raised in every call that waits for the index
            loading.set_exception(error)

    threading.Thread(target=load, daemon=True, name="corpus index").start()
    return loading
