"""Examinations before a run: `check-tool`, `check-interaction`, and the rows of a data set against the tools."""
