"""Traces of conversations: `rollout.trace.backend`, and RL-Insight."""
