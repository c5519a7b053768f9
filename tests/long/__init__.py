"""Searches for events that must never happen: small by default, with their full parameter under the mark `long`.

`python -m benchmarks.NAME` runs the same, and prints its figures as JSON.
"""
