"""Parsers that read a turn of the model: text, reasoning and tool calls."""
