"""The files of a model: where it lies, its weights, its export and its card."""
