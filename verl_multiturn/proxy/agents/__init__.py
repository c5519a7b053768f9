"""The agents: how one is called, in a thread or a process, and how it ended."""
