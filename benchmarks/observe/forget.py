"""Run `tests/long/observe/forgetting.py` with 200 sessions of 5 users; exit with 1 if it finds something wrong."""

import json
import sys
import tempfile
from pathlib import Path

from tests.long.observe.forgetting import forgotten, is_right

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = forgotten(Path(folder))
    print(json.dumps(found))
    sys.exit(not is_right(found))
