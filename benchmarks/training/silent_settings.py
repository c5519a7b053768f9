"""Run `tests/long/training/silent_settings.py`; exit with 1 if a setting differs from the table."""

import argparse
import json
import sys
from pathlib import Path

from tests.long.training import silent_settings
from tests.support.config_reads import reads_in

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=silent_settings.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the shared variants on top of one recipe alone")
    parser.add_argument("--without-run", action="store_true", help="no traced run")
    parser.add_argument("--reads", type=Path, help="folder of a traced run's reads, in place of a new run")
    options = parser.parse_args()
    read = silent_settings.traced_run
    if options.reads or options.without_run:
        read = lambda _: reads_in(options.reads) if options.reads else []  # noqa: E731
    summary = silent_settings.run(options.short, read)
    print(json.dumps(summary))
    sys.exit(not silent_settings.holds(summary))
