"""Rows of a batch: the steps between their generation and their update."""
