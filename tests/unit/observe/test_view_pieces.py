"""Texts of token ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.observe.documents import token_text
from verl_multiturn.observe.documents.token_text import Pieces, find
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

TINY = Path(__file__).parents[3] / "verl_multiturn" / "rollout" / "tiny_chat"


def written(folder: Path, data: dict[str, Any]) -> Pieces:
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Pieces(folder)


def test_pieces_are_the_tokenizers_text() -> None:
    text = '<|im_start|>user\nHé 🙂 <tool_call>{"name": 1}</tool_call><|im_end|>'
    ids = tiny_tokenizer().encode(text)
    pieces = Pieces(TINY).of(ids)
    data = [piece.encode() if isinstance(piece := pieces[str(each)], str) else bytes(piece) for each in ids]
    assert b"".join(data).decode() == text
    assert Pieces(TINY).of([1, 999_999]) == {"1": "<|im_start|>"}


def test_sentence_pieces(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
    vocabulary = {"▁the": 0, "▁": 1, "<0xE2>": 2, "<0x0A>": 3, "a": 4}
    pieces = written(tmp_path, {"model": {"vocab": vocabulary}, "decoder": decoder, "added_tokens": []})
    assert pieces.of(range(5)) == {"0": " the", "1": " ", "2": [0xE2], "3": "\n", "4": "a"}


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    pieces = written(tmp_path, {"model": {"vocab": [["<unk>", 0.0], ["▁a", -1.5]]}, "decoder": {"type": "Metaspace"}})
    assert pieces.of([1]) == {"1": " a"}


def test_a_strange_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no vocabulary"):
        written(tmp_path, {"model": {}})


def test_a_relative_path_begins_above_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "run" / "records").mkdir(parents=True)
    records = tmp_path / "run" / "records"
    assert find("model", records) is None  # of somebody else's run it lies elsewhere
    assert find(str(tmp_path / "model"), records) is None
    monkeypatch.setattr(token_text, "is_own", lambda folder: True)
    assert find("model", records) == tmp_path / "model" / "tokenizer.json"
    monkeypatch.undo()
    (tmp_path / "model").rename(tmp_path / "run" / "model")
    assert find("model", records) == tmp_path / "run" / "model" / "tokenizer.json"
    assert find("no/such-model", tmp_path) is None
