"""What tools use to reach a service: HTTP, MCP servers, services that run code."""
