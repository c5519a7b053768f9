"""Tasks in Harbor's form without Harbor: read, written, checked, and judged in workspaces of the embedded sandbox."""
