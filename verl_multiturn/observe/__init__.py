"""Looking at a run: its metrics and its display, and the checks of `verl-multiturn doctor`."""
