"""`Bm25Index`: a BM25 index of a folder of documents, built once, kept on disk, memory-mapped by all its processes.

    <index_dir>/<hash of the corpus>/   bm25s' arrays and vocabulary, documents.jsonl, offsets.npy, names.npy

Invariants:
- an index is found by the hash of the corpus' content, so an index of other content is never used;
- a folder with that name is complete: it is written under another name and then renamed; of several processes, one
  builds the index and the others wait;
- the same query on the same corpus gives the same hits in the same order; documents with equal scores keep the corpus'
  order. So do the documents of a page.

A `.txt` or `.md` file is one document. Each line of a `.jsonl` file is one document: `contents` or `text`, and
optionally `id` and `title`.

`verl-multiturn index --corpus DIR` builds the index of a large corpus before a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import mmap
import os
import re
import shutil
import tempfile
import time
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import cache_folder, open_regular
from verl_multiturn.rows.files import refuse_pointer

logger = logging.getLogger(__name__)

# Part of the hash: raise it when the layout, the tokenizer or the scoring changes.
_FORMAT = "2"
_TEXT_SUFFIXES = (".txt", ".md")
_MOST_BYTES = 1 << 26
"""Bytes that a document may have, so that a file without an end does not fill the memory."""
_MOST_QUERY_TOKENS = 128
_TITLE_CHARACTERS = 200
_QUOTED = re.compile(r'"(.*\S.*)"')
# Scripts whose words are searched as pairs of characters: Thai and Lao, Burmese, Khmer, kana, Han, Hangul.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30fa\u30fc-\u30ff"
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff"
)


@dataclass(frozen=True)
class CorpusDocument:
    """A document of the corpus.

    Attributes:
        id: The line's `id`; otherwise the file's path in the corpus, for a line with `:` and its number.
        title: The line's `title`, or nothing; for a file, the start of its first line, or its name.
        text: The text.
    """

    id: str
    title: str
    text: str

    def page(self) -> tuple[str, str]:
        """Return the name of the page that it belongs to, and its text there.

        The name is its title. Without one it is the first line in quotes, as in Search-R1's corpora, which is then no
        part of the text; or else its id.
        """
        if self.title:
            return self.title, self.text
        first, _, rest = self.text.partition("\n")
        quoted = len(first) <= _TITLE_CHARACTERS and _QUOTED.fullmatch(first.strip())
        return (quoted[1], rest) if quoted else (self.id, self.text)


@dataclass(frozen=True)
class Hit:
    """A document that was found, with its BM25 score for the query."""

    document: CorpusDocument
    score: float


class Bm25Index:
    """An index on disk. Several threads may search it at once.

    Args:
        folder: The folder of the index, which is complete; `open` finds or builds it.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here: it takes a quarter of a second, and only processes that search need it. It ships no types.
        import bm25s  # type: ignore[import-untyped]
        import numpy as np

        self._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self._names = np.load(folder / "names.npy", mmap_mode="r")
        with open(folder / "documents.jsonl", "rb") as file:
            self._documents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def open(cls, corpus: Path, index_dir: Path | None = None) -> Bm25Index:
        """Open the index of a corpus; build it first if it is not there yet, which may take minutes.

        Args:
            corpus: Folder of the documents.
            index_dir: Folder of the indices; None for `verl-multiturn/bm25` in the user's cache directory.

        Raises:
            ConfigError: The corpus cannot be read, has no documents or no words, a line is not a document, or
                `index_dir` cannot be written.
        """
        index_dir = index_dir or cache_folder("bm25")
        try:
            folder = index_dir / _corpus_hash(corpus)
        except OSError as error:
            raise ConfigError(
                f"the corpus {str(corpus)!r} cannot be read: {error}; mend or remove that file"
            ) from error
        if not folder.is_dir():
            try:
                index_dir.mkdir(parents=True, exist_ok=True)
                with _lock(folder.with_suffix(".lock")):
                    if not folder.is_dir():
                        _build(corpus, folder)
            except OSError as error:
                raise ConfigError(
                    f"the index of {str(corpus)!r} cannot be written to {str(index_dir)!r}: {error}; set index_dir to "
                    "another folder"
                ) from error
        return cls(folder)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return the documents that fit a query best, best first.

        Args:
            query: The query.
            top_k: Largest number of documents. A document that shares no word with the query is never returned.
        """
        import numpy as np

        vocabulary = self._bm25.vocab_dict
        ids = [vocabulary[token] for token in query_tokens(query) if token in vocabulary]
        if not ids:
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        top_k = min(top_k, len(scores))
        threshold = np.partition(scores, -top_k)[-top_k]
        found = np.flatnonzero(scores >= max(threshold, np.finfo(scores.dtype).tiny))
        order = np.lexsort((found, -scores[found]))[:top_k]
        return [Hit(self._document(int(i)), float(scores[i])) for i in found[order]]

    def page(self, name: str) -> list[CorpusDocument]:
        """Return the documents of a page, in the corpus' order; none where there is no such page.

        Args:
            name: The page's name (`CorpusDocument.page`), or the id of a document. Case, blanks, and the zero-width
                spaces with which tool responses are made harmless do not matter. A name goes before an id.
        """
        import numpy as np

        key = _name_key(name)
        hashes, numbers = self._names
        wanted = np.uint64(_name_hash(key))
        first, last = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
        found = [self._document(int(number)) for number in numbers[first:last]]
        named = [document for document in found if _name_key(document.page()[0]) == key]
        return named or [document for document in found if _name_key(document.id) == key]

    def _document(self, number: int) -> CorpusDocument:
        start, end = self._offsets[number], self._offsets[number + 1]
        return CorpusDocument(*json.loads(self._documents[start:end]))


def corpus_files(corpus: Path) -> list[Path]:
    """Return the paths of a corpus' files, in the order of its documents.

    Args:
        corpus: Folder of the documents.

    Raises:
        ConfigError: It is not a folder, or has no `.txt`, `.md` or `.jsonl` file.
    """
    if not corpus.is_dir():
        raise ConfigError(f"corpus {str(corpus)!r} is no folder; give one of .txt, .md or .jsonl files")
    files = [
        Path(parent, name)
        for parent, _, names in os.walk(corpus)
        for name in names
        if name.endswith((*_TEXT_SUFFIXES, ".jsonl")) and not name.startswith(".")
    ]
    if not files:
        raise ConfigError(f"corpus {str(corpus)!r} has no .txt, .md or .jsonl file")
    return sorted(files, key=lambda file: file.relative_to(corpus).as_posix())


def read_documents(corpus: Path) -> Iterator[CorpusDocument]:
    """Yield the documents of a corpus, in order.

    Args:
        corpus: Folder of the documents.

    Raises:
        ConfigError: A line of a `.jsonl` file is not a document, a file is a Git LFS pointer, or the corpus has no
            files.
    """
    for file in corpus_files(corpus):
        name = file.relative_to(corpus).as_posix()
        with _opened(file, corpus):
            refuse_pointer(file)
        if file.suffix in _TEXT_SUFFIXES:
            with io.TextIOWrapper(_opened(file, corpus), encoding="utf-8-sig", errors="replace") as opened:
                text = opened.read().strip()
            first = text.partition("\n")[0].strip("# \t")
            yield CorpusDocument(name, first[:100] or file.stem, text)
            continue
        with _opened(file, corpus) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_MOST_BYTES + 1), b""), start=1):
                if len(line) > _MOST_BYTES:
                    raise ConfigError(
                        f"{name}:{number}: this line has more than {_MOST_BYTES} bytes; split the document"
                    )
                if line.strip():
                    yield _read_line(line, f"{name}:{number}")


def _opened(file: Path, corpus: Path) -> BinaryIO:
    """Open a file of a corpus, which lies in its folder; the links of Hugging Face's cache are followed.

    Raises:
        ConfigError: It is not a plain file, leads out of the folder, or is too long for one document.
    """
    whole = corpus.resolve()
    within = next((each.parent for each in whole.parents if each.name == "snapshots"), whole)
    opened = open_regular(file, within)
    if file.suffix in _TEXT_SUFFIXES and (size := os.fstat(opened.fileno()).st_size) > _MOST_BYTES:
        opened.close()
        raise ConfigError(f"{str(file)!r} has {size} bytes, and a document at most {_MOST_BYTES}; split it")
    return opened


def _read_line(line: bytes, where: str) -> CorpusDocument:
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this line is no JSON: {error}; mend it") from None
    text = (raw.get("contents") or raw.get("text")) if isinstance(raw, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: expected an object with a string under 'contents' or 'text', got {raw!r:.200}")
    return CorpusDocument(str(raw.get("id", where)), str(raw.get("title") or ""), text)


def document_tokens(text: str) -> list[str]:
    """Return the tokens by which a text is found.

    The tokens are its words in folded case. A word in one of the scripts of `_UNSPACED` gives its characters and its
    pairs of neighbours instead. Tokens come as often as in the text.
    """
    tokens: list[str] = []
    for word, unspaced in _words(text):
        if not unspaced:
            tokens.append(word)
            continue
        tokens.extend(word)
        tokens.extend(word[i : i + 2] for i in range(len(word) - 1))
    return tokens


def query_tokens(text: str) -> list[str]:
    """Return the tokens that a query asks for, each once, at most `_MOST_QUERY_TOKENS`.

    The tokens are its words in folded case. A word of several characters in one of the scripts of `_UNSPACED` gives its
    pairs of neighbours instead.
    """
    tokens: dict[str, None] = {}
    for word, unspaced in _words(text):
        parts = [word[i : i + 2] for i in range(len(word) - 1)] if unspaced and len(word) > 1 else [word]
        tokens.update(dict.fromkeys(parts))
    return list(tokens)[:_MOST_QUERY_TOKENS]


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each word in folded case, and whether it is written in one of the scripts of `_UNSPACED`."""
    pattern = _word_pattern()
    for match in pattern.finditer(unicodedata.normalize("NFKC", text).casefold()):
        yield match[0], match.lastgroup == "unspaced"


@cache
def _word_pattern() -> re.Pattern[str]:
    # For `\w` of `re` a combining mark is not a letter, which would split Hindi and Arabic words.
    marks = "".join(chr(c) for c in range(0x300, 0xFE30) if unicodedata.category(chr(c)).startswith("M"))
    letter = f"[^\\W_{_UNSPACED}]"
    return re.compile(f"(?P<unspaced>[{_UNSPACED}]+)|(?P<spaced>{letter}+(?:[{marks}]+{letter}*)*)")


def _corpus_hash(corpus: Path) -> str:
    import bm25s

    digest = hashlib.sha256(f"{_FORMAT} {bm25s.__version__}".encode())
    for file in corpus_files(corpus):
        with _opened(file, corpus) as content:
            digest.update(repr(file.relative_to(corpus).as_posix()).encode())
            digest.update(hashlib.file_digest(content, "sha256").digest())  # type: ignore[arg-type]
    return digest.hexdigest()[:32]


def _build(corpus: Path, folder: Path) -> None:
    import bm25s
    import numpy as np

    started = time.monotonic()
    logger.warning("building the BM25 index of %s in %s; this is done once for this content", corpus, folder)
    for left in folder.parent.glob(f"{folder.name}.new-*"):  # left by a process that died, since we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.new-", dir=folder.parent))
    try:
        vocabulary: dict[str, int] = {}
        token_ids: list[list[int]] = []
        offsets = [0]
        hashes, numbers = array("Q"), array("Q")  # of millions of names
        with open(new / "documents.jsonl", "wb") as file:
            for document in read_documents(corpus):
                line = json.dumps([document.id, document.title, document.text]).encode() + b"\n"
                file.write(line)
                offsets.append(offsets[-1] + len(line))
                for key in {_name_key(document.page()[0]), _name_key(document.id)}:
                    hashes.append(_name_hash(key))
                    numbers.append(len(token_ids))
                tokens = document_tokens(f"{document.title}\n{document.text}")
                token_ids.append([vocabulary.setdefault(token, len(vocabulary)) for token in tokens])
        if not vocabulary:
            raise ConfigError(f"corpus {str(corpus)!r} has no words")
        np.save(new / "offsets.npy", np.array(offsets, dtype=np.int64))
        names = np.array([hashes, numbers], dtype=np.uint64)
        np.save(new / "names.npy", names[:, np.lexsort((names[1], names[0]))])
        # Use numpy, not numba: its sums differ in the last bit, and machines share an index.
        bm25 = bm25s.BM25(backend="numpy", csc_backend="numpy")
        bm25.index((token_ids, vocabulary), show_progress=False)
        bm25.save(new, show_progress=False)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been faster, where locks do not work
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)  # it does not exist any more if all went well
    logger.warning("%d documents indexed in %.1f s", len(token_ids), time.monotonic() - started)


def _name_key(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name.replace("\u200b", "")).casefold().split())


def _name_hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as file:
        # Where locks do not work (some network file systems), several processes build and one of them wins.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
