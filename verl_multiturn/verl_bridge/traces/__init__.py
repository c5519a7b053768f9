"""Traces of conversations: `rollout.trace.backend`, and RL-Insight."""

import verl  # noqa: F401  # first: see the room's own docstring
