"""The table of all conversations of a folder of records, in memory and in the user's cache."""
