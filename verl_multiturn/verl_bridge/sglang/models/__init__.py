"""Repaired versions of SGLang's models that the pinned transformers breaks."""
