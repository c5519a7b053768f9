"""Loading of tools: from YAML files, from functions, and by the kwargs of a data row."""
