"""The command line `verl-multiturn`."""
