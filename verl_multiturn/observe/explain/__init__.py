"""Explain a run: which symptoms its records show, with evidence, examples and what to do; a file for each family."""
