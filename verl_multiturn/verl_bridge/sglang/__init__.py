"""Modules that SGLang 0.5.12 loads through its own settings for external packages (`plugin.py` sets them).

They are imported only in SGLang's processes.
"""

import verl  # noqa: F401  # first: see the room's own docstring
