"""Sessions of agents at random, through the real endpoint."""
