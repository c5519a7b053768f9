"""Sandbox for untrusted Python code: a pool of sandboxes, and the modules that run inside each of them."""
