"""Run `tests/long/inputs/inputs.py`, and write its table where it is wanted; exit with 1 if an input went wrong."""

import argparse
import asyncio
import json
import logging
import sys
import time
from pathlib import Path

from tests.long.inputs import inputs

if __name__ == "__main__":
    described = (inputs.__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inputs", description=described)
    parser.add_argument("--short", action="store_true", help="try some of each subject, in seconds")
    parser.add_argument("--subject", action="append", choices=inputs.SUBJECTS, help="only this subject; repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table into this file")
    options = parser.parse_args()
    logging.getLogger("verl_multiturn").setLevel(logging.CRITICAL)  # these inputs cause warnings
    cases = [case for case in inputs.all_cases() if not options.subject or case.subject in options.subject]
    began = time.monotonic()
    tried = asyncio.run(inputs.try_all(inputs.short_form(cases) if options.short else cases))
    wrong = inputs.wrong_of(tried)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if options.out:
        options.out.write_text(inputs.table_of(tried), encoding="utf-8")
    print(json.dumps(inputs.summary_of(tried, time.monotonic() - began)))
    sys.exit(bool(wrong))
