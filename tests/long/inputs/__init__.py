"""Inputs as people have them, through the doors of the product."""
