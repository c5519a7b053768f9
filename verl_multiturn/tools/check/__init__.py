"""Checks before a run: a tool's contract, and the rows of a data set."""
