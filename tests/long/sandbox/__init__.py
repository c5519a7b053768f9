"""Attacks on the sandbox, and on verdicts on what was left in it."""
