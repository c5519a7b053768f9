"""`DisturbedError`: a run of tests that says nothing, for whatever reason."""

from __future__ import annotations


class DisturbedError(Exception):
    """A run came to no verdict: it was late, ended in the middle, or what it wrote cannot be read.

    Whether the model's code did that, the untouched original says: the judge runs the same tests on it.
    """
