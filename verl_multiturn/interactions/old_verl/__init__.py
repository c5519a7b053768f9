"""Interactions that were written for verl 0.4 to 0.6."""
