"""`SearchTool`: BM25 search over a folder of documents, in the worker itself; no server is needed.

Invariant: the same query gives the same answer. `CorpusTool` has those of the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.bm25 import Bm25Index, CorpusDocument, Hit, query_tokens
from verl_multiturn.tools.corpus import CorpusSettings, CorpusTool
from verl_multiturn.tools.schema import ToolSchema

_QUERY_CHARACTERS = 1_000
# A passage of a long document is chosen from this many first occurrences of each word.
_OCCURRENCES = 50


class ResultSettings(BaseModel):
    """Settings of every tool that returns documents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    top_k: int = Field(3, gt=0, le=100)
    """Largest number of documents for each query."""

    snippet_characters: int = Field(1_000, ge=20)
    """Characters shown of each document. Of a longer one, the passage with the most words of the query is shown."""

    max_queries: int = Field(5, gt=0)
    """Largest number of queries in one call, where the schema lets `query` be a list."""


class SearchSettings(CorpusSettings, ResultSettings):
    """Settings of the search tool: of the corpus and of the results."""


class SearchTool(CorpusTool):
    """The tool `search(query)`.

    Args:
        config: The fields of `SearchSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own. One of your own may let `query` be an array of strings.

    Raises:
        ConfigError: A setting is wrong, or the corpus has no files.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(SearchSettings, config, "config")
        super().__init__(self._settings, config, tool_schema)

    def get_schema(self) -> ToolSchema:
        """Return the schema: one argument, `query`, a text."""
        return search_schema()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search for the queries of a call.

        Returns:
            The documents as text, no reward, and the metric `hits`, the number of documents.

        Raises:
            ValueError: There is nothing to search for; the text is for the model.
            ConfigError: The index could not be built.
        """
        queries = read_queries(parameters["query"], self._settings.max_queries)
        index = await self._index()
        # In a thread: a query takes a millisecond for 100,000 short documents, and would block the loop for millions.
        return await asyncio.to_thread(self._answer, index, queries)

    def _answer(self, index: Bm25Index, queries: Sequence[str]) -> tuple[ToolResponse, float, dict[str, Any]]:
        hits = [index.search(query, self._settings.top_k) for query in queries]
        text = show_hits(queries, hits, self._settings.snippet_characters)
        return ToolResponse(text), 0.0, {"hits": sum(map(len, hits))}


def search_schema() -> ToolSchema:
    """Return the schema of a tool `search` with one argument, `query`, a text."""
    query = {"type": "string", "description": "What to look for: a few words that the document would contain."}
    return ToolSchema.read(
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search a collection of documents. Returns the passages that fit best.",
                "parameters": {"type": "object", "properties": {"query": query}, "required": ["query"]},
            },
        },
        "search",
    )


def read_queries(raw: Any, most: int) -> list[str]:
    """Return the queries of a call as a list.

    Args:
        raw: The argument of the call, a string or a list of strings.
        most: Largest number of queries.

    Raises:
        ValueError: There is no query, there are too many, or one is empty, too long or has no words. The text is for
            the model.
    """
    queries = [raw] if isinstance(raw, str) else raw
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ValueError("give the query as text")
    if len(queries) > most:
        raise ValueError(f"{len(queries)} queries are too many; give at most {most} in one call")
    for query in queries:
        if not query.strip():
            raise ValueError("the query is empty; say what to look for")
        if len(query) > _QUERY_CHARACTERS:
            raise ValueError(f"the query has {len(query)} characters; use at most {_QUERY_CHARACTERS}, a few words do")
        if not query_tokens(query):
            raise ValueError(f"the query {query.strip()[:50]!r} has no words; say what to look for")
    return queries


def show_hits(queries: Sequence[str], hits: Sequence[Sequence[Hit]], snippet_characters: int) -> str:
    """Return the text that the model reads: the documents of each query, best first.

    Args:
        queries: The queries.
        hits: The documents found for each query.
        snippet_characters: Characters shown of each document.
    """
    parts = []
    for query, found in zip(queries, hits, strict=True):
        if len(queries) > 1:
            parts.append(f"Results for {query!r}:")
        if not found:
            parts.append("No document fits; try other words.")
        for rank, hit in enumerate(found, start=1):
            title = hit.document.title or hit.document.id
            parts.append(f"[{rank}] {title}\n{_snippet(hit.document, query_tokens(query), snippet_characters)}")
    return "\n\n".join(parts)


def _snippet(document: CorpusDocument, words: Sequence[str], most: int) -> str:
    """Return `most` characters of a document, where the most different words are close together."""
    text = document.text
    if len(text) <= most:
        return text
    lowered = text.lower()
    places: list[tuple[int, str]] = []
    for word in words:
        place = lowered.find(word)
        for _ in range(_OCCURRENCES):
            if place < 0:
                break
            places.append((place, word))
            place = lowered.find(word, place + len(word))
    places.sort()
    best, start, first = 0, 0, 0
    inside: dict[str, int] = {}
    for place, word in places:
        inside[word] = inside.get(word, 0) + 1
        while place - places[first][0] > most * 3 // 4:
            gone = places[first][1]
            inside[gone] -= 1
            if not inside[gone]:
                del inside[gone]
            first += 1
        if len(inside) > best:
            best, start = len(inside), places[first][0]
    start = max(0, min(start - most // 8, len(text) - most))
    return f"{'…' if start else ''}{text[start : start + most].strip()}{'…' if start + most < len(text) else ''}"
