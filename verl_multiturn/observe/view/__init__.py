"""The viewer: an index of a run's conversations, a server for this machine alone, and a page that needs no build."""
