"""Attacks on the sandbox, and on verdicts on its final state."""
