"""Run `tests/long/training/recipe_configs.py`; exit with 1 if a configuration is not well."""

import argparse
import json
import sys

from tests.long.training import recipe_configs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=recipe_configs.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the shared variants on top of one recipe alone")
    summary = recipe_configs.run(parser.parse_args().short)
    print(json.dumps(summary))
    sys.exit(bool(summary["failed"]))
