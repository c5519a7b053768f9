"""The viewer: a server for this machine alone, and a page that needs no build."""
