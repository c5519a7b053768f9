"""An evaluation: the trainer's own data set, loops, tools and rewards in one process, and SGLang in a child of it."""

import verl  # noqa: F401  # first: see the room's own docstring
