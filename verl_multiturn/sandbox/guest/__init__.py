"""The code that runs inside a sandbox. It imports the standard library only."""
