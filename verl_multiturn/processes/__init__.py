"""Processes for work that may hang or crash; they can be killed."""
