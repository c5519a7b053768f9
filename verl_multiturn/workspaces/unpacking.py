"""A tree of files, brought into a sandbox by the cells of `program_cells.py`."""

from __future__ import annotations

import base64

from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.workspaces.calls import expect_done
from verl_multiturn.workspaces.disturbed import DisturbedError

_PIECE_BYTES = 90_000


async def unpack(sandbox: Sandbox, tar: bytes) -> None:
    """Unpack a tar in the folder of a sandbox.

    Args:
        sandbox: A sandbox that has the functions of `program_cells.py`, and no untrusted code yet.
        tar: The tar.

    Raises:
        DisturbedError: It cannot be unpacked: the disk is full.
        OutageError: The sandbox ended, in which no untrusted code has run.
    """
    for start in range(0, len(tar), _PIECE_BYTES):
        piece = base64.b64encode(tar[start : start + _PIECE_BYTES]).decode()
        await sandbox.run(f"upload({piece!r})", with_value=True)  # a cell that is not kept
    result = await sandbox.run("unpack()", with_value=True)
    expect_done(result)
    if result.value != b"unpacked":
        raise DisturbedError(f"the tree cannot be unpacked: {result.output[-300:]}")
