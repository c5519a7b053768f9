"""Rules about the groups of a prompt, without a trainer: ages, over-sampling, difficulty."""
