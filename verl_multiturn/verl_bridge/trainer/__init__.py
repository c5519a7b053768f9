"""The additions to verl's trainers."""
