"""`verl-multiturn run`: a recipe's Hydra configuration, its data, and verl's trainer in a separate process."""
