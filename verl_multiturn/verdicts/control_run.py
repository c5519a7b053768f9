"""`DisturbedError`: a run of tests without a verdict, for whatever reason."""

from __future__ import annotations


class DisturbedError(Exception):
    """A run came to no verdict: it was late, ended in the middle, or its output cannot be read.

    Whether the model's code did that is tried on the untouched original: the judge runs the same tests on it.
    """
