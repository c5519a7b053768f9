"""Simulated users and environments: what they promise, and what becomes of a group when they fail."""
