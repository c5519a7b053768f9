"""Reading records: files, lines, conversations, joins, scores and fates."""
