"""Engines: the protocol, the clients that sample over HTTP, scripted ones, and guards around them."""
