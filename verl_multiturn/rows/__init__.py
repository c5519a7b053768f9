"""Rows of data: their files, their keys in a batch, and the numbers of their rewards."""
