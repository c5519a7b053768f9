"""Everything that touches verl and Ray: agent loop, rollout, trainers and the start-up check."""

# Import verl first. `import verl` loads the plugin, and the plugin imports modules of this room. A module of this room
# that was imported before verl would be only half loaded at that moment.
import verl  # noqa: F401
