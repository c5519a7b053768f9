"""Run the whole corpus of `tests/long/tokens/control_tokens.py`."""

import argparse
import json

from tests.long.tokens import control_tokens
from tests.support.families import names

if __name__ == "__main__":
    summary = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=control_tokens.__doc__, formatter_class=summary)
    parser.add_argument("family", nargs="*", choices=[[], *names()], help="all by default")
    print(json.dumps(control_tokens.run(parser.parse_args().family or names())))
