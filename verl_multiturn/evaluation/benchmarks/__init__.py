"""Evaluations by name: a YAML file for each benchmark, and a table with the source of each of its cells."""
