"""The session of one agent: its requests, the forest of its completions, and its rows."""
