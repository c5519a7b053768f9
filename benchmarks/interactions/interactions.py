"""Run `tests/long/interactions/interactions.py`."""

import argparse
import json
import logging
from pathlib import Path

from tests.long.interactions import interactions
from tests.long.interactions.interaction_old_classes import VERSION

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=interactions.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help=f"the wheel of verl {VERSION}")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # hostile texts make many a warning
    print(json.dumps(interactions.measure(options.wheel)))
