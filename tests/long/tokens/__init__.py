"""Tokens: what becomes of texts, masks, rows, conversations and their records."""
