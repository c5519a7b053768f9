"""The text of token ids, read from a tokenizer's `tokenizer.json`.

A record holds ids. The page shows their text at each token's place, also where one letter is several
tokens. So each id has a piece: its text, or its bytes where they are not a whole text. No tokenizer library is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.paths import read_regular
from verl_multiturn.trust.rule import is_own

FILE = "tokenizer.json"
_MOST_BYTES = 1 << 26
"""Bytes of the largest `tokenizer.json`: those of 250,000 tokens have some 33 MB."""
Piece = str | list[int]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The pieces of a tokenizer's ids.

    Args:
        path: Folder of the tokenizer, or its `tokenizer.json`.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is none of a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        file = path / FILE if path.is_dir() else path
        data: Any = json.loads(read_regular(file, most=_MOST_BYTES))
        try:
            vocabulary = data["model"]["vocab"]
            texts = (
                vocabulary if isinstance(vocabulary, dict) else {text: at for at, (text, *_) in enumerate(vocabulary)}
            )
            self._own: dict[int, str] = {int(number): str(text) for text, number in texts.items()}
            self._added: dict[int, str] = {
                int(token["id"]): str(token["content"]) for token in data.get("added_tokens") or []
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{file} has no vocabulary") from None
        kinds = set(_kinds(data.get("decoder"))) | set(_kinds(data.get("pre_tokenizer")))
        self._bytes = _byte_letters() if "ByteLevel" in kinds else {}
        self._marks_spaces = not self._bytes and ("Metaspace" in kinds or any("▁" in text for text in texts))
        self.vocabulary = {**texts, **{text: number for number, text in self._added.items()}}
        """Ids by the tokenizer's own form of their text."""

    def of(self, ids: Iterable[int]) -> dict[str, Piece]:
        """Return the pieces of ids, by the id as text. An id that the tokenizer does not have is omitted."""
        return {str(number): piece for number in set(ids) if (piece := self._piece(number)) is not None}

    def _piece(self, number: int) -> Piece | None:
        if (added := self._added.get(number)) is not None:
            return added
        text = self._own.get(number)
        if text is None:
            return None
        if self._bytes:
            try:
                data = bytes(self._bytes[letter] for letter in text)
            except KeyError:  # a token that was added to the vocabulary itself
                return text
            try:
                return data.decode()
            except UnicodeDecodeError:
                return list(data)
        if found := _BYTE.fullmatch(text):
            value = int(found[1], 16)
            return chr(value) if value < 128 else [value]
        return text.replace("▁", " ") if self._marks_spaces else text


def find(named: str, folder: Path) -> Path | None:
    """Return where the tokenizer lies that a run's file names; None: it is not on this machine, or not the run's.

    Of somebody else's run only a tokenizer in its own folder is read, or a public one by its name.

    Args:
        named: A path, or a name of the Hugging Face hub, which is looked for in its cache alone.
        folder: Folder of the records; a relative path may begin in a folder above it.
    """
    whole = folder.resolve()
    run = whole.parent if whole.name == "records" else whole
    for base in (Path(), *whole.parents):
        if (path := base / named / FILE).is_file():
            return path if path.resolve().is_relative_to(run) or is_own(whole) else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(named, FILE)
    except (ImportError, ValueError, OSError):
        return None
    return Path(found) if isinstance(found, str) else None


def _kinds(part: Mapping[str, Any] | None) -> Iterable[str]:
    """Yield the types of a part of a tokenizer, and of its members."""
    if not isinstance(part, Mapping):
        return
    yield str(part.get("type"))
    for name in ("decoders", "pretokenizers"):
        for inner in part.get(name) or ():
            yield from _kinds(inner)


def _byte_letters() -> dict[str, int]:
    """Return the letters that represent bytes in a byte-level vocabulary, as GPT-2 has them.

    A byte with a visible Latin-1 letter is that letter. The others are letters from U+0100 on, in their order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in visible)
    return letters | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}
