"""Run `tests/long/training/roles.py`; exit with 1 if anything is wrong."""

import argparse
import json

from tests.long.training import roles

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=roles.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    line = roles.figures(parser.parse_args().short)
    print(json.dumps(line))
    raise SystemExit(1 if line["wrong"] else 0)
