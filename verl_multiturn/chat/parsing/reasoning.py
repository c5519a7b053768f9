"""Reasoning sections in the text of a turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Pairs that open and close a reasoning section, by model family. Models that were only prompted to reason also write
# the first pair, as plain text.
THINK = ("<think>", "</think>")


REASONING_MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis", "<|end|><|start|>assistant"),
)


class ReasoningFinder:
    """A finder of the reasoning sections in a turn's text.

    Args:
        marks: Pairs of texts that open and close a section.
    """

    def __init__(self, marks: Sequence[tuple[str, str]] = (THINK,)) -> None:
        self._closes = dict(marks)
        self.openings = "|".join(re.escape(mark) for mark in sorted(self._closes, key=len, reverse=True))
        """Regular expression for the marks that open a section."""
        self._openings = re.compile(self.openings)

    def opened_by(self, before: str) -> str | None:
        """Return the mark of a section that is opened right before a turn, white space aside; None without one.

        A mark further back does not count: it is text of a prompt or of a tool.
        """
        end = before.rstrip()
        return next((start for start in self._closes if end.endswith(start)), None)

    def end(self, text: str, mark: str, position: int) -> int:
        """Return the index where a section ends: after its closing mark, or at the end of the text.

        The search for the closing mark of the section that `mark` opened begins at `position`.
        """
        close = self._closes[mark]
        at = text.find(close, position)
        return len(text) if at < 0 else at + len(close)

    def after(self, text: str, opened: str | None = None) -> str:
        """Return the text that follows the reasoning at its beginning.

        `opened` is the mark of a section that began before the text.
        """
        position = self.end(text, opened, 0) if opened else 0
        while (found := self._openings.search(text, position)) and not text[position : found.start()].strip():
            position = self.end(text, found[0], found.end())
        return text[position:]

    def split(self, text: str, opened: str | None = None) -> tuple[str, str]:
        """Split a text without calls into `(reasoning, rest)`, each in its order.

        The marks belong to the reasoning. So does `opened`, the mark of a section that began before the text.
        """
        end = self.end(text, opened, 0) if opened else 0
        inside, outside = [opened or "", text[:end]], []
        position = end
        while found := self._openings.search(text, position):
            end = self.end(text, found[0], found.end())
            outside.append(text[position : found.start()])
            inside.append(text[found.start() : end])
            position = end
        return "".join(inside), "".join([*outside, text[position:]])
