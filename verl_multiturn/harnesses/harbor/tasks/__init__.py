"""Tasks in Harbor's form without Harbor: read, written, checked, and scored in workspaces of the embedded sandbox."""
