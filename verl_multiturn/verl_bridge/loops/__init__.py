"""The agent loops of a run, what they share, and the rows that they return to verl."""
