"""Verification of records, files and folders: `verl-multiturn verify`."""
