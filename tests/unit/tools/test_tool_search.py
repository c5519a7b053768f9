"""BM25 over a folder: the passages that are found, their order, and the index on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving import conversation
from tests.support.warm_python import light_python
from verl_multiturn import ConfigError
from verl_multiturn.tools.bm25 import Bm25Index, document_tokens, query_tokens, read_documents
from verl_multiturn.tools.search import SearchTool

LINES: list[dict[str, Any]] = [
    {"id": 7, "title": "Paris", "contents": "Paris is the capital of France."},
    {"id": "b", "text": "Berlin is the capital of Germany. Die Straße ist lang."},
    {"contents": "机器学习是人工智能的一个分支。"},
    {"contents": "東京は日本の首都です。"},
    {"contents": "हिन्दी भारत की भाषा है"},
    {"contents": "ประเทศไทยมีเมืองหลวงชื่อกรุงเทพ"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "notes").mkdir(parents=True)
    (folder / "facts.jsonl").write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n", encoding="utf-8")
    (folder / "notes" / "tea.md").write_text("# How to make tea\n\nBoil water, add leaves.", encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9 and croissants")
    (folder / ".hidden.txt").write_text("hidden treasure")
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def index(corpus: Path, tmp_path: Path) -> Bm25Index:
    return Bm25Index.open(corpus, tmp_path / "index")


def found(index: Bm25Index, query: str, top_k: int = 1) -> list[str]:
    return [hit.document.id for hit in index.search(query, top_k)]


def test_documents_of_every_format(corpus: Path) -> None:
    documents = {document.id: (document.title, document.text) for document in read_documents(corpus)}
    assert documents["7"] == ("Paris", "Paris is the capital of France.")
    assert documents["facts.jsonl:3"] == ("", LINES[2]["contents"])
    assert documents["notes/tea.md"] == ("How to make tea", "# How to make tea\n\nBoil water, add leaves.")
    assert documents["latin.txt"][1] == "caf\N{REPLACEMENT CHARACTER} and croissants"
    assert len(documents) == 8


@pytest.mark.parametrize(
    ("query", "document"),
    [
        ("capital of france?", "7"),
        ("GERMANY", "b"),
        ("STRASSE", "b"),
        ("Ｇｅｒｍａｎｙ", "b"),
        ("人工智能", "facts.jsonl:3"),
        ("什么是机器学习", "facts.jsonl:3"),
        ("首", "facts.jsonl:4"),
        ("日本の首都", "facts.jsonl:4"),
        ("हिन्दी", "facts.jsonl:5"),
        ("เมืองหลวง", "facts.jsonl:6"),
        ("boil the water", "notes/tea.md"),
    ],
)
def test_what_fits_best_is_found(index: Bm25Index, query: str, document: str) -> None:
    assert found(index, query) == [document]


def test_nothing_is_found_for_foreign_words(index: Bm25Index) -> None:
    assert found(index, "xylophone hidden", 5) == []
    assert found(index, "", 5) == []


def test_tokens() -> None:
    assert document_tokens("Don't stop_me 3.14 GPU-2") == ["don", "t", "stop", "me", "3", "14", "gpu", "2"]
    assert document_tokens("第3章：学习") == ["第", "3", "章", "学", "习", "学习"]
    assert query_tokens("学习 学习法 a A") == ["学习", "习法", "a"]
    assert query_tokens("हिन्दी") == ["हिन्दी"]
    assert query_tokens("?!… \n") == []


def test_a_corpus_that_cannot_be_read(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", broken)
    with pytest.raises(ConfigError, match=r"the corpus '.*' cannot be read: .*Input/output error; mend or remove"):
        Bm25Index.open(corpus, tmp_path / "elsewhere")


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [{"id": i, "contents": "same words" if i % 2 else f"same words {i}"} for i in range(500)]
    (corpus / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    index = Bm25Index.open(corpus, tmp_path / "index")
    assert found(index, "words same", 40) == [str(i) for i in range(1, 80, 2)]
    hits = index.search("words", 500)
    assert len(hits) == 500
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_the_index_is_kept_and_found_by_content(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "index"
    caplog.set_level(logging.WARNING)
    Bm25Index.open(corpus, kept)
    assert len(caplog.records) == 2
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    Bm25Index.open(moved, kept)
    assert len(caplog.records) == 2, "built again for the same content"
    (moved / "latin.txt").write_text("tea without water")
    assert found(Bm25Index.open(moved, kept), "tea", 2) == ["latin.txt", "notes/tea.md"]
    assert len([path for path in kept.iterdir() if path.is_dir()]) == 2


def test_several_processes_build_one_index(corpus: Path, tmp_path: Path) -> None:
    kept = tmp_path / "index"
    command = [light_python(), "-m", "verl_multiturn.cli", "index", "--corpus", str(corpus), "--index-dir", str(kept)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert [out for out, _ in said] == ["8 documents\n"] * 3
    assert sum("documents indexed" in errors for _, errors in said) == 1, "one builds, the others wait"
    (folder,) = [path for path in kept.iterdir() if path.is_dir()]

    shutil.rmtree(folder)  # the next process clears away a killed process's files
    left = kept / f"{folder.name}.new-dead"
    left.mkdir()
    Bm25Index.open(corpus, kept)
    assert [path for path in kept.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "bad.jsonl:2: this line is no JSON"),
        ("[1]", "bad.jsonl:2: expected an object with a string under 'contents' or 'text'"),
        ('{"contents": 3}', "bad.jsonl:2: expected"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + content)
    with pytest.raises(ConfigError, match=message):
        Bm25Index.open(tmp_path, tmp_path / "index")
    assert not [path for path in (tmp_path / "index").iterdir() if path.is_dir()], "a failed build leaves nothing"


def test_a_corpus_or_an_index_folder_that_cannot_work(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        SearchTool({"corpus": str(tmp_path / "missing")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.txt"):
        SearchTool({"corpus": str(tmp_path / "empty")})
    (tmp_path / "empty" / "a.txt").write_text("?")
    with pytest.raises(ConfigError, match="has no words"):
        Bm25Index.open(tmp_path / "empty", tmp_path / "index")
    with pytest.raises(ConfigError, match="set index_dir"):
        Bm25Index.open(corpus, corpus / "latin.txt" / "index")
    with pytest.raises(ConfigError, match="did you mean 'top_k'"):
        SearchTool({"corpus": str(corpus), "topk": 3})


def tool_of(corpus: Path, **config: Any) -> SearchTool:
    return SearchTool({"corpus": str(corpus), "index_dir": str(corpus.parent / "index"), **config})


async def test_the_tool_answers_one_query_or_several(corpus: Path) -> None:
    tool = tool_of(corpus, top_k=1)
    async with conversation(tool) as call:
        response, reward, metrics = await call(query="capital of France")
        assert response.text == "[1] Paris\nParis is the capital of France."
        assert (reward, metrics) == (0.0, {"hits": 1})
        response, _, metrics = await call(query=["Germany", "xylophone"])
        assert response.text == (
            "Results for 'Germany':\n\n[1] b\nBerlin is the capital of Germany. Die Straße ist lang.\n\n"
            "Results for 'xylophone':\n\nNo document fits; try other words."
        )
        assert metrics == {"hits": 1}
    assert tool.pure


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "the query is empty"),
        (" \n", "the query is empty"),
        ("?!", "has no words"),
        ("a" * 1001, "at most 1000"),
        ([], "give the query as text"),
        (3, "give the query as text"),
        (["a", 3], "give the query as text"),
        (["a"] * 6, "at most 5 in one call"),
    ],
)
async def test_absurd_queries_are_answered(corpus: Path, query: Any, message: str) -> None:
    async with conversation(tool_of(corpus)) as call:
        with pytest.raises(ValueError, match=message):
            await call(query=query)
        assert (await call(query="tea"))[2] == {"hits": 1}


async def test_a_long_document_is_shown_where_the_words_are(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = "filler tea " * 500 + "the quick brown fox jumps " + "padding " * 500
    (corpus / "long.txt").write_text(text)
    async with conversation(tool_of(corpus, snippet_characters=80)) as call:
        response, _, _ = await call(query="quick brown tea fox")
    shown = response.text.partition("\n")[2]
    assert "quick brown fox" in shown
    assert len(shown) <= 82
    assert shown[0] == shown[-1] == "…"


async def test_a_broken_corpus_is_told_to_everyone_who_asks(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "bad.jsonl").write_text("{")
    tool = tool_of(corpus)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"bad.jsonl:1"):  # raised by `create`, if the error is known by then
            async with conversation(tool) as call:
                await call(query="tea")
    with pytest.raises(ConfigError, match=r"bad.jsonl:1"):
        await tool.create("c2")


async def test_a_cancelled_call_does_not_stop_the_loading(corpus: Path) -> None:
    tool = tool_of(corpus)
    async with conversation(tool) as call:
        tasks = [asyncio.create_task(call(query="tea")) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert [metrics for _, _, metrics in done[1:]] == [{"hits": 1}] * 2  # type: ignore[misc]


def test_one_tool_serves_several_event_loops(corpus: Path) -> None:
    tool = tool_of(corpus)

    async def ask() -> dict[str, Any]:
        async with conversation(tool) as call:
            return (await call(query="tea"))[2]

    assert [asyncio.run(ask()) for _ in range(2)] == [{"hits": 1}] * 2
