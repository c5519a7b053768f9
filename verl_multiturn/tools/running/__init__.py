"""The life of one call: from the session through a slot to the tool."""
