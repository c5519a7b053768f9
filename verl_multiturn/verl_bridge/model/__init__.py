"""The parts around a run's model: its chat codec, its call format and its processor of images."""

import verl  # noqa: F401  # first: see the room's own docstring
