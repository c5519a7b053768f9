"""Tools: the base for authors of tools, the tools in the box, and the calls of tools in a conversation."""
