"""Image processors for SGLang that do not change the ids of a prompt."""
