"""Retrieval server over the BM25 index, with the protocol of Search-R1's server.

    verl-multiturn retrieval-server --corpus DIR --port 8000

`POST /retrieve` takes `{"queries": [...], "topk": 3, "return_scores": true}`. `POST /browse` opens a page, as in
`browse_service.py`. `GET /health` returns the number of documents. One process can serve all workers and nodes of a
run, which then need neither the corpus nor its index.

It has no authentication: bind it to an address that only the run's nodes reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from verl_multiturn.tools.bm25 import Bm25Index, CorpusDocument
from verl_multiturn.tools.browse import open_part

_BODY_BYTES = 4_000_000
_BODY_S = 30.0
_QUERY_CHARACTERS = 10_000
_CONTENT_CHARACTERS = 20_000
_ENDING_S = 2.0
"""Seconds that requests under way have when the server is ended."""
_AT_ONCE = 4_096
"""The most requests under way; others are answered with HTTP 503, which `RetrievalTool` repeats."""


class RetrieveRequest(BaseModel):
    """Request of Search-R1's protocol."""

    queries: list[Annotated[str, Field(max_length=_QUERY_CHARACTERS)]] = Field(min_length=1, max_length=1_024)
    topk: int | None = Field(None, gt=0, le=100)
    return_scores: bool = False


class BrowseRequest(BaseModel):
    """Request for a part of a page."""

    page: str = Field(min_length=1, max_length=_QUERY_CHARACTERS)
    part: int = Field(1, ge=1)
    part_characters: int = Field(4_000, ge=20, le=100_000)


Asked = TypeVar("Asked", bound=BaseModel)


def build_server(index: Bm25Index, default_top_k: int = 3, at_once: int = _AT_ONCE) -> web.AppRunner:
    """Return the server, which does not listen yet.

    Args:
        index: The index that it searches.
        default_top_k: Largest number of documents for each query, where a request has no number.
        at_once: The most requests under way.
    """
    under_way = 0

    @web.middleware
    async def refuse_too_many(request: web.Request, handler: Any) -> web.StreamResponse:
        nonlocal under_way
        if under_way >= at_once:
            return _problem(503, f"{at_once} requests are under way; ask again later")
        under_way += 1
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        finally:
            under_way -= 1

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "documents": len(index)})

    async def retrieve(asked: RetrieveRequest) -> Any:
        top_k = asked.topk or default_top_k
        found = await asyncio.to_thread(_search, index, asked.queries, top_k, asked.return_scores)
        return {"result": found}

    async def browse(asked: BrowseRequest) -> Any:
        title, text, parts = await asyncio.to_thread(open_part, index, asked.page, asked.part, asked.part_characters)
        return _readable({"title": title, "text": text, "parts": parts})

    app = web.Application(middlewares=[refuse_too_many], client_max_size=_BODY_BYTES)
    app.router.add_get("/health", health)
    app.router.add_post("/retrieve", _answering(RetrieveRequest, retrieve))
    app.router.add_post("/browse", _answering(BrowseRequest, browse))
    # A body that is compressed is not JSON: aiohttp logs one that it cannot unpack as a mistake of ours.
    return web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=_ENDING_S)


def _answering(
    form: type[Asked], answer: Callable[[Asked], Awaitable[Any]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that reads a request of a form, and answers it in JSON."""

    async def handle(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
        except TimeoutError:
            return _problem(408, f"the request took longer than {_BODY_S:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _problem(413, f"more than {_BODY_BYTES} bytes")
        except (ConnectionError, web.RequestPayloadError) as error:  # the client has gone
            return _problem(400, f"the body cannot be read ({error})")
        try:
            asked = form.model_validate_json(body)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            return _problem(422, f"{where}: {problem['msg']}" if where else problem["msg"])
        return web.json_response(await answer(asked))

    return handle


def _problem(status: int, said: str) -> web.Response:
    answer = web.json_response({"detail": said}, status=status)
    if status in (400, 408, 413):
        answer.force_close()  # the rest of the body is not to be taken for another request
    return answer


def _search(index: Bm25Index, queries: list[str], top_k: int, with_scores: bool) -> list[list[dict[str, Any]]]:
    results = []
    for query in queries:
        hits = index.search(query, top_k)
        documents = [_shown(hit.document) for hit in hits]
        if with_scores:
            documents = [
                {"document": document, "score": hit.score} for document, hit in zip(documents, hits, strict=True)
            ]
        results.append(documents)
    return results


def _shown(document: CorpusDocument) -> dict[str, Any]:
    title, text = document.title, document.text[:_CONTENT_CHARACTERS]
    return _readable({"id": document.id, "title": title, "contents": f"{title}\n{text}" if title else text})


def _readable(shown: dict[str, Any]) -> dict[str, Any]:
    # Half of a surrogate pair is not text: some readers of JSON refuse its escape.
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in shown.items()
    }
