"""Run `tests/long/tokens/template_matrix.py`, and write its table where it is wanted."""

import argparse
import json
import logging
from pathlib import Path

from tests.long.tokens import template_matrix

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=template_matrix.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=60, help="for each family")
    parser.add_argument("--table", type=Path, help="write the table of families and rules there")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # verl's warnings about families without a builder of their own
    figures = template_matrix.run(options.cases)
    if options.table:
        options.table.write_text(template_matrix.table_of_rules(), encoding="utf-8")
    print(json.dumps(figures))
