"""The rollout of one request: the conversation's loop and limits, the engine protocol, and trajectories."""
