"""Tools for clients of other programs: each of their sessions gets tools of its own, over MCP or A2A."""
