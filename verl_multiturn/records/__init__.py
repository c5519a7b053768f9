"""Records: the files of all conversations that began, written by workers and read by every command."""
