"""Simulated users and environments: their promises, and the fate of a group when they fail."""
