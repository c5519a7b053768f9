"""Run `tests/long/tokens/masked_gradient.py`."""

import argparse
import json

from tests.long.tokens import masked_gradient

if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=masked_gradient.__doc__, formatter_class=described).parse_args()
    print(json.dumps(masked_gradient.run()))
