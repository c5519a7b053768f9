"""Searches for what must never happen: small with the default command, with their full parameter under the mark `long`.

`python -m benchmarks.NAME` runs the same, and prints its figures as JSON.
"""
