"""Run `tests/long/tokens/certificate.py` on a quickstart."""

import argparse
import json
from pathlib import Path

from tests.long.tokens import certificate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=certificate.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="of the quickstart")
    parser.add_argument("--run", type=Path, help="folder of a finished quickstart; none is started then")
    args = parser.parse_args()
    out = args.run or certificate.ROOT / "outputs" / "certificate"
    if args.run is None:
        certificate.run_quickstart(out, args.steps)
    print(json.dumps(certificate.run(out)))
