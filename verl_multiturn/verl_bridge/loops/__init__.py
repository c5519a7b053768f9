"""The agent loops of a run, what they share, and the rows that they return to verl."""

import verl  # noqa: F401  # first: see the room's own docstring
