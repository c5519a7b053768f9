"""`RowKey`: the name of a row in TransferQueue, where verl keeps the batch. No other module parses names."""

from __future__ import annotations

from typing import NamedTuple


class RowKey(NamedTuple):
    """The parts of a row's name, `<uid>_<session>_<row>`.

    The rows of one uid are a group; those of one uid and session are a conversation. A prompt's name is its uid alone.
    A part that a name lacks is None, so that `str` gives every name back as it was.
    """

    uid: str
    session: str | None = None
    row: str | None = None

    @classmethod
    def parse(cls, name: str) -> RowKey:
        """Take a name apart. Example: `RowKey.parse("u_1_0") == RowKey("u", "1", "0")`."""
        return cls(*name.rsplit("_", 2))

    def __str__(self) -> str:
        return "_".join(part for part in self if part is not None)

    @property
    def conversation(self) -> str:
        """Name of the row's conversation, `<uid>_<session>`."""
        return f"{self.uid}_{self.session}"

    @property
    def number(self) -> int:
        """The row's index in its conversation, from 0; -1 where the name has no number there."""
        return int(self.row) if self.row is not None and self.row.isdecimal() else -1
