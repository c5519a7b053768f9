"""Parsers that read what the model wrote: text, reasoning and tool calls."""
