"""A folder of somebody else: which of it is data, and who may use the rest. One rule, which every command follows."""
