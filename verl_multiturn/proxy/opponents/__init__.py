"""Opponents: other models that play a role of a session (`proxy.opponents`), and are never trained."""
