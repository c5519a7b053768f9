"""Explain a run: which symptoms its records show, with evidence, examples and remedies; a file for each family."""
