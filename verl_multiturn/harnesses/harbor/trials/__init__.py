"""The bridge to Harbor: one trial of Harbor for each session. Most of it runs in Harbor's own Python (`trial.py`)."""
