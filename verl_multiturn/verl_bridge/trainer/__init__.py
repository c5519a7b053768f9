"""What is added to verl's trainers."""
