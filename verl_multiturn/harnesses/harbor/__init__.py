"""The bridge to Harbor: its tasks, its trials, and mini-swe-agent as its agent."""
