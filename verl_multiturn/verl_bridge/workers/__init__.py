"""Agent-loop workers: the manager and the workers of verl, and the rows that they store."""
