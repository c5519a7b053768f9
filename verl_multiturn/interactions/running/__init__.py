"""The interaction of one conversation: its choice, its session, and the reading of its replies."""
