"""Loading of authors' objects: by a dotted name, by an entry point of a package, and from the list of a YAML file."""
