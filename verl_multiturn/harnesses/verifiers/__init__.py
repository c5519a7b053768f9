"""The bridge to verifiers: its environments, each played by one process for many sessions, in verifiers' own Python."""
