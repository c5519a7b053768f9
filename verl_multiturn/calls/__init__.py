"""Guarded calls of an author's code: each has a slot, a deadline, and a conversation that it belongs to.

`loading/` finds that code: by a dotted name, by the entry points of installed packages, and in a YAML file's list.
"""
