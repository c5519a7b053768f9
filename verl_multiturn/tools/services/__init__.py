"""Connections of tools to services: HTTP, MCP servers, services that run code."""
