"""Commands for people who work on the project; `scripts.harnesses` is a package."""
