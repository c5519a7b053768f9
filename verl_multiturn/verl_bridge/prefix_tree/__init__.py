"""A training engine that computes each common prefix of a micro-batch's rows once.

forest.py      rows become a forest: each common prefix once
packing.py     micro-batches that count a forest's tokens
attention.py   each segment attends over its ancestors and itself
support.py     the cases that the engine cannot compute exactly
engine.py      verl's FSDP engine, with all of this
"""

import verl  # noqa: F401  # first: see the room's own docstring
