"""Run `tests/long/training/async_faults.py`."""

import json

from benchmarks.quickstart_runs import arguments, folder
from tests.long.training import async_faults

if __name__ == "__main__":
    parser = arguments(async_faults.__doc__ or "", async_faults.MODES)
    kinds, limit_s = tuple(async_faults.TITLES), async_faults.LIMIT_S
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--kills", type=int, default=3, help="kills of each kind, in each mode")
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds without progress after which a run hangs")
    given = parser.parse_args()
    out = folder(given.out, "async_faults")
    print(json.dumps(async_faults.run(out, given.modes, given.kinds, given.kills, given.seed, given.limit)))
