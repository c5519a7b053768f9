"""Replay: recorded conversations, made again with today's code."""
