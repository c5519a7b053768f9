"""Tools: what the author of a tool needs, the tools in the box, and the calls of tools in a conversation."""
