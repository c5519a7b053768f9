"""`verl-multiturn run`: a recipe's Hydra configuration, its data, and verl's trainer on it, as a process of its own."""
