"""Processes that do what may hang or crash, and can be killed."""
