"""Things that verifiers would leave behind, or fetch, in a process of the bridge. Runs in verifiers' Python.

- A tool set's process writes its port to a file in `/tmp`, which nobody removes. If it ends before, verifiers waits for
  the port for three minutes; here the wait ends with it.
- TextArena fetches word lists when it is imported. They are there already, or the game is refused by name: without a
  network each import would wait for it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch

from verl_multiturn.errors import ConfigError

_KINDS = {"words": "corpora", "averaged_perceptron_tagger_eng": "taggers"}
"""The word lists of TextArena's games, and the folders in which NLTK looks for them."""
_read_port = launch._read_back_port


def install() -> None:
    """Have these things done by the functions below."""
    launch._read_back_port = _read_and_remove
    try:
        import nltk
    except ImportError:  # TextArena is not installed
        return
    nltk.download = _found_words


async def _read_and_remove(runtime: Any, path: str) -> int:
    if runtime.type != "subprocess":
        return int(await _read_port(runtime, path))
    reading = asyncio.ensure_future(_read_port(runtime, path))
    ending = asyncio.ensure_future(runtime._background[-1].wait())
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ToolsetError("its process ended before it had a port")
        return int(reading.result())
    finally:
        for each in (reading, ending):
            each.cancel()
        await asyncio.wait({reading, ending})
        _remove(path)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def check_words() -> None:
    """Refuse TextArena's games where their word lists are missing.

    Raises:
        ConfigError: One is.
    """
    for name in _KINDS:
        _found_words(name)


def _found_words(name: str, *_: Any, **__: Any) -> bool:
    """Stand for `nltk.download`.

    Raises:
        ConfigError: The word list is not on this machine.
    """
    import nltk

    for form in (name, f"{name}.zip"):
        try:
            nltk.data.find(f"{_KINDS.get(name, '*')}/{form}")
        except LookupError:
            continue
        return True
    raise ConfigError(
        f"TextArena's games need the word list {name!r}, which is not on this machine; run `{sys.executable} -m "
        f"nltk.downloader -d {sys.prefix}/nltk_data {' '.join(_KINDS)}` where there is a network"
    )
