"""Run `tests/long/interactions/interaction_envs.py`."""

import argparse
import json

from tests.long.interactions import interaction_envs

if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=interaction_envs.__doc__, formatter_class=described).parse_args()
    print(json.dumps(interaction_envs.figures()))
