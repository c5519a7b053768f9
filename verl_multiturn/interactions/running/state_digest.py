"""`state_digest`: when two replies have the same state (`Reply.state`).

The estimator `mt_gigpo` compares the turns of a group that begin in one state, and a metric counts the conversations in
which a state occurs again. The conversations of a group may run in several processes, and records have the digest in
the place of the state.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from verl_multiturn.describe import show
from verl_multiturn.errors import InteractionContractError

_DEEPEST = 20
"""How deep tuples and frozensets may lie in one another."""


def state_digest(state: Any, where: str) -> str:
    """Return the digest of a state in hexadecimal, equal for equal states in all processes.

    Args:
        state: None, text, bytes, a number, or a tuple or frozenset of these.
        where: The place that the error names.

    Raises:
        InteractionContractError: It is, or holds, something else.
    """
    return hashlib.blake2b(
        _canonical(state, where, _DEEPEST).encode(errors="surrogatepass"), digest_size=16
    ).hexdigest()


def _canonical(state: Any, where: str, depth: int) -> str:
    """Return a text that is the same for equal states in every process, and different for states that differ.

    `hash` will not do: it differs from process to process. Nor will `repr`: it may hold an address.
    """
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, float) and state.is_integer():
        state = int(state)  # equal numbers are equal states: 1, 1.0 and True
    if state is None or isinstance(state, int | float | str | bytes):
        if isinstance(state, int):
            return f"n:{int(state):x}"  # in decimals Python writes no number of more than 4,300 digits
        return f"{'n' if isinstance(state, float) else type(state).__name__}:{state!r}"
    if depth and isinstance(state, tuple | frozenset):
        parts = [_canonical(part, where, depth - 1) for part in state]
        if isinstance(state, frozenset):
            return "{" + ",".join(sorted(parts)) + "}"
        return "(" + ",".join(parts) + ")"
    raise InteractionContractError(
        f"{where} is {show(state)}; give text, bytes, a number, or a tuple or frozenset of these"
    )
