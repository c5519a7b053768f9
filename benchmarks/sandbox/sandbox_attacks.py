"""Run `tests/long/sandbox/sandbox_attacks.py`; exit with 1 if the machine is not as it was before."""

import argparse
import json
import os
import sys
from pathlib import Path

from tests.long.sandbox import sandbox_attacks as attacks
from tests.long.sandbox.sandbox_host import ROOT

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=attacks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the attacks whose name begins so")
    parser.add_argument("--packages", action="store_true", help="with the installed packages in the sandbox")
    parser.add_argument("--without-root", action="store_true", help="as a user without rights")
    options = parser.parse_args()
    if options.without_root and os.geteuid() == 0:
        attacks.become_nobody([Path(sys.prefix), Path(sys.base_prefix), ROOT])
    figures, is_as_before = attacks.run(options.only, options.packages)
    print(json.dumps(figures))
    sys.exit(None if is_as_before else "the machine is not as it was before")
