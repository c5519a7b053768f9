"""Everything that touches verl and Ray: agent loop, rollout, trainers and the start-up check.

Each folder here imports verl first, in its `__init__.py`: `import verl` loads the plugin, and the plugin imports
modules of this room. A module that was imported before verl would be only half loaded at that moment. `startup/` and
the files beside it import verl in functions alone, since a setting is refused before verl is imported. `compat/` and
`certificate/` import none of it: the processes that verify a batch start without it.
"""
