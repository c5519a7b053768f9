"""Verdicts: how the work that an agent did in a workspace is graded, by tests that it cannot see."""
