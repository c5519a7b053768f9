"""Guarded calls of an author's code: each has a slot, a deadline, and a conversation that it belongs to."""
