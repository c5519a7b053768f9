"""`RetrievalTool`: a client of a Search-R1 style retrieval server, such as `retrieval_server.py`.

POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}
→ {"result": [[{"document": {"id": …, "contents": …}, "score": …}, …], …]}
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from verl_multiturn.config import read_model
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.bm25 import CorpusDocument, Hit
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.search import ResultSettings, read_queries, search_schema, show_hits
from verl_multiturn.tools.services.http_client import HttpSettings, HttpTool

_TITLE_CHARACTERS = 200


class RetrievalSettings(HttpSettings, ResultSettings):
    """Settings of the retrieval tool: of the service and of the results."""


class _DocumentBody(BaseModel):
    contents: str = Field(validation_alias=AliasChoices("contents", "text"))
    id: str | int = ""
    title: str = ""


class _HitBody(BaseModel):
    document: _DocumentBody
    score: float = 0.0


class _Hits(BaseModel):
    result: list[list[_HitBody]]


class RetrievalTool(HttpTool):
    """The tool `search(query)`.

    Args:
        config: The fields of `RetrievalSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own. One of your own may let `query` be an array of strings.

    Raises:
        ConfigError: A setting is wrong.
    """

    pure = True
    service = "search server"
    path = "/retrieve"

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(RetrievalSettings, config, "config")
        super().__init__(self._settings, config, tool_schema)

    def get_schema(self) -> ToolSchema:
        """Return the schema: one argument, `query`, a text."""
        return search_schema()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search for the queries of a call, all with one request.

        Returns:
            The documents as text, no reward, and the metric `hits`, the number of documents.

        Raises:
            ValueError: There is nothing to search for, or the server refuses the request; the text is for the model.
            UnavailableError: The server does not answer.
            ServiceFailedError: It failed at this request, broke off, or its answer cannot be read.
        """
        settings = self._settings
        queries = read_queries(parameters["query"], settings.max_queries)
        payload = {"queries": queries, "topk": settings.top_k, "return_scores": True}
        answer = await self._ask(payload, _Hits)
        if len(answer.result) != len(queries):
            raise self._unreadable(f"{len(answer.result)} results")
        hits = [[_read_hit(hit) for hit in found[: settings.top_k]] for found in answer.result]
        text = show_hits(queries, hits, settings.snippet_characters)
        return ToolResponse(text), 0.0, {"hits": sum(map(len, hits))}


def _read_hit(raw: _HitBody) -> Hit:
    """Turn a server's hit into ours. In Search-R1's corpora the contents begin with the title, in quotes on a line."""
    document, title, text = raw.document, raw.document.title, raw.document.contents
    first, newline, rest = text.partition("\n")
    if newline and (first.strip('"') == title or (not title and len(first) <= _TITLE_CHARACTERS)):
        title, text = first.strip('"'), rest
    return Hit(CorpusDocument(str(document.id), title, text), raw.score)
