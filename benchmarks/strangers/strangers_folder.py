"""Run `tests/long/strangers/strangers_folder.py`; exit with 1 if anything was counted."""

import argparse
import json
import sys
import time
from pathlib import Path

from tests.long.strangers import strangers_folder as folder
from tests.long.strangers.strangers_commands import COMMANDS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strangers_folder", description=folder.TITLE)
    parser.add_argument("--short", action="store_true", help="some cases of each kind, in a minute or two")
    parser.add_argument("--case", action="append", metavar="WORDS", help="only cases whose name has these words")
    parser.add_argument("--parts", nargs="+", choices=folder.PARTS, default=folder.PARTS, help="only these kinds")
    parser.add_argument("--command", action="append", metavar="NAME", help="only this command; repeatable")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the folders there, and keep the honest ones")
    options = parser.parse_args()
    began = time.monotonic()
    cases = [
        case
        for case in folder.all_cases(options.parts)
        if (not options.short or case.is_short)
        and (not options.case or any(words in case.name for words in options.case))
    ]
    commands = [each for each in COMMANDS if not options.command or each.name in options.command]
    summary = folder.run(cases, commands, options.short, options.keep)
    print(json.dumps(summary | {"seconds": round(time.monotonic() - began, 1)}))
    sys.exit(not summary["holds"])
