"""Interactions that were written for verl 0.4 to 0.6; they are understood until 2027-06-01."""
