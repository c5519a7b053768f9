"""The room that touches verl and Ray."""

# First of all: `import verl` loads the plugin, which imports modules of this room. Were one of them imported before
# verl, the plugin would find it half made.
import verl  # noqa: F401
