"""Means that keep an engine from reading the same tokens again: turns that lead, and turns that wait for room."""
