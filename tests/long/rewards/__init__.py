"""Rewards: beside their originals, and against wrong answers that try to earn."""
