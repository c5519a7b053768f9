"""Tools that fail, in many conversations at once."""
