"""Output of a cell, bounded in length."""

from __future__ import annotations


class BoundedOutput:
    """The first and the last characters of a stream, however long the stream is.

    Args:
        characters: How many characters are kept; one half from the beginning, the other half from the end.

    Attributes:
        total: Bytes that were added since the last `take`, kept or not.
    """

    def __init__(self, characters: int) -> None:
        self._half = characters // 2
        self._bytes = 4 * self._half  # a character has at most four bytes in UTF-8
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Add the next bytes of the stream."""
        self.total += len(chunk)
        room = self._bytes - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        del self._tail[: -self._bytes]

    def take(self) -> str:
        """Return the text so far, and forget it.

        A text that is too long is returned as its two halves, with a note between them.
        """
        head, tail, total = bytes(self._head), bytes(self._tail), self.total
        self._head.clear()
        self._tail.clear()
        self.total = 0
        if total == len(head) + len(tail):
            text = (head + tail).decode("utf-8", "replace")
            if len(text) <= 2 * self._half:
                return text
            first, last = text[: self._half], text[-self._half :]
        else:
            first = head.decode("utf-8", "replace")[: self._half]
            last = tail.decode("utf-8", "replace")[-self._half :]
        return f"{first}\n[… the output of {total} bytes is shortened …]\n{last}"
