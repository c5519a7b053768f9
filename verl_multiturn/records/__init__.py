"""Records: what is kept on disk of every conversation that began, written by workers and read by every command."""
