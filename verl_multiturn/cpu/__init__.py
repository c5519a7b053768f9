"""The CPU platform: everything that verl and SGLang need on a machine without an accelerator, and nothing else.

It is chosen by `VERL_PLATFORM=cpu`, or detected when there is no accelerator. Beside it only `doctor` and the start of
a run look at the platform.
"""

# Import verl first, as in verl_bridge: the plugin imports modules of this room while verl is imported.
import verl  # noqa: F401
