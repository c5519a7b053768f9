"""Replay: a recorded conversation made again, with engine, tools, users and agents that a record answers."""
