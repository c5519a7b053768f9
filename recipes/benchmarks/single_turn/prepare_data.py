"""Write the rows of a benchmark with one question and one answer: `eval --benchmark NAME` calls it.

    python recipes/benchmarks/single_turn/prepare_data.py --out DIR --benchmark NAME --source FILE-OR-FOLDER

The source is the set as its authors publish it; `docs/reference/benchmark-protocols.md` has its place and its columns.
`--smoke` makes ten rows of the same form.
"""

from __future__ import annotations

import json

from made_entries import made_entries
from readers import PROBLEM_READERS, read_entries, rows_of

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import read_protocol
from verl_multiturn.runs.data import arguments, prepare, write_rows


def main() -> None:
    """Write `test.parquet`."""
    parser = arguments(__doc__ or "", "")
    parser.add_argument("--benchmark", choices=list(PROBLEM_READERS), required=True)
    args = parser.parse_args()
    protocol = read_protocol(args.benchmark)
    if not args.smoke and not args.source:
        raise ConfigError(protocol.needed(args.benchmark))
    if args.smoke:
        entries = [made.entry for made in made_entries(args.benchmark)]
    else:
        entries = read_entries(args.benchmark, protocol, args.source)
    rows, left_out = rows_of(args.benchmark, protocol, entries)
    print(json.dumps({"benchmark": args.benchmark, "rows": len(rows), "left_out": dict(left_out)}), flush=True)
    write_rows(args.out, {"test": rows})


if __name__ == "__main__":
    prepare(main)
