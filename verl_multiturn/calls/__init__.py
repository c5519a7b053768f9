"""Guarded calls of an author's code: each has a slot, a deadline, and a conversation that it belongs to.

`loading.py` and `entry_points.py` find that code: by a dotted name, and by the entry points of installed packages.
"""
