"""Replay: recorded conversations, made again with today's code."""

import verl  # noqa: F401  # first: see the room's own docstring
