"""Training: gradients, groups, configurations and settings."""
