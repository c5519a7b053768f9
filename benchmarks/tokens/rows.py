"""Run `tests/long/tokens/rows.py`, and write its report where it is wanted."""

import argparse
import json
import logging
from pathlib import Path

from tests.long.tokens import rows
from tests.support.families import names

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=rows.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", choices=[[], *names()], help="all by default")
    parser.add_argument("--short", action="store_true", help="few cases of each kind")
    parser.add_argument("--out", type=Path, help="write the table of families and rows there, with all that went wrong")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # verl's warnings about families, and the engine that fails in each conversation
    verdicts = rows.run(options.family or names(), options.short)
    if options.out:
        options.out.write_text(rows.report(verdicts), encoding="utf-8")
    print(json.dumps(rows.summary(verdicts)))
