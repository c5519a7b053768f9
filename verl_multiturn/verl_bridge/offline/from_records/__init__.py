"""Learning from recorded conversations: the data set of verl's SFT trainer, and an agent loop that samples nothing."""

import verl  # noqa: F401  # first: see the room's own docstring
