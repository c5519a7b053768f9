"""Retrieval server over the BM25 index, with the protocol of Search-R1's server.

    python -m verl_multiturn.tools.retrieval_server --corpus DIR --port 8000

`POST /retrieve` takes `{"queries": [...], "topk": 3, "return_scores": true}`. `GET /health` returns the number of
documents. One process can serve all workers and nodes of a run, which then need neither the corpus nor its index.

It has no authentication: bind it to an address that only the run's nodes reach.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from verl_multiturn.tools.bm25 import Bm25Index, Document

_BODY_BYTES = 4_000_000
_BODY_S = 30.0
_QUERY_CHARACTERS = 10_000
_CONTENT_CHARACTERS = 20_000


class RetrieveRequest(BaseModel):
    """Request of Search-R1's protocol."""

    queries: list[Annotated[str, Field(max_length=_QUERY_CHARACTERS)]] = Field(min_length=1, max_length=1_024)
    topk: int | None = Field(None, gt=0, le=100)
    return_scores: bool = False


def build_app(index: Bm25Index, default_top_k: int = 3) -> FastAPI:
    """Return the server's application.

    Args:
        index: The index that it searches.
        default_top_k: Largest number of documents for each query, where a request does not say.
    """
    app = FastAPI(title="verl-multiturn retrieval server")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "documents": len(index)}

    @app.post("/retrieve", openapi_extra={"requestBody": {"content": {"application/json": {"schema": _schema()}}}})
    async def retrieve(request: Request) -> dict[str, Any]:
        try:
            asked = RetrieveRequest.model_validate_json(await _body(request))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise HTTPException(422, f"{where}: {problem['msg']}" if where else problem["msg"]) from None
        top_k = asked.topk or default_top_k
        return {"result": await run_in_threadpool(_search, index, asked.queries, top_k, asked.return_scores)}

    return app


def serve(
    corpus: Annotated[Path, typer.Option(help="Folder of .txt, .md and .jsonl files.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    index_dir: Annotated[Path | None, typer.Option(help="Where indices are kept.")] = None,
    top_k: Annotated[int, typer.Option(help="Documents for each query where a request says nothing.")] = 3,
    max_connections: Annotated[
        int, typer.Option(help="Connections at once; others are answered with HTTP 503.")
    ] = 4096,
) -> None:
    """Serve the BM25 index of a corpus to retrieval tools; build it first, if it is not there yet."""
    app = build_app(Bm25Index.open(corpus, index_dir), top_k)
    uvicorn.run(app, host=host, port=port, limit_concurrency=max_connections, access_log=False, ws="none")


def _schema() -> dict[str, Any]:
    return RetrieveRequest.model_json_schema()


async def _body(request: Request) -> bytes:
    """Return a request's body, of at most `_BODY_BYTES` and received within `_BODY_S`.

    Raises:
        HTTPException: The body is too large, too slow, or the client went away.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_BYTES:
                    raise HTTPException(413, f"more than {_BODY_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the request took longer than {_BODY_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None
    return bytes(body)


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


def _shown(document: Document) -> dict[str, Any]:
    text = document.text[:_CONTENT_CHARACTERS].encode("utf-8", "replace").decode()
    contents = f"{document.title}\n{text}" if document.title else text
    return {"id": document.id, "title": document.title, "contents": contents}


if __name__ == "__main__":
    typer.run(serve)
