"""Run `tests/long/interactions/interaction_old_classes.py`."""

import argparse
import json
from pathlib import Path

from tests.long.interactions import interaction_old_classes as old

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=old.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"the wheel of verl {old.VERSION}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(old.measure(options.wheel, seed=options.seed)))
