"""verl without a training: evaluation, replay, and learning from records."""
