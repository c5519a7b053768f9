"""The agent loops of a run, their shared parts, and the rows that they return to verl."""

import verl  # noqa: F401  # first: see the room's own docstring
