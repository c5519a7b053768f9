"""The additions to verl's trainers.

Importing verl's trainers registers ours (`plugin.py`). They are imported here first, so that this happens before any
module of this folder is half imported.
"""

import verl.trainer.ppo.v1  # noqa: F401
