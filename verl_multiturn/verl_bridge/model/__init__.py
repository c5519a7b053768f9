"""What the model of a run needs around it: its chat codec, its call format and its processor of images."""

import verl  # noqa: F401  # first: see the room's own docstring
