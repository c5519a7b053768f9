"""The start-up check, by subject."""
