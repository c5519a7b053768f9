"""Run `tests/long/interactions/interaction_advantages.py`."""

import argparse
import json

from tests.long.interactions import interaction_advantages

if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=interaction_advantages.__doc__, formatter_class=described).parse_args()
    print(json.dumps(interaction_advantages.figures()))
