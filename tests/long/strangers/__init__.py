"""A folder that somebody else made is data."""
