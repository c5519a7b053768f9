"""The servers of a run: verl's SGLang server with our additions, and the client that asks it for generations."""

import verl  # noqa: F401  # first: see the room's own docstring
