"""Tokens: the fate of texts, masks, rows, conversations and their records."""
