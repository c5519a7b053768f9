"""Rows of a batch: what is done to them between generation and update."""
