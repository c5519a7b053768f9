"""Run `tests/long/training/fates.py`."""

import json

from benchmarks.quickstart_runs import arguments, folder
from tests.long.training import fates

if __name__ == "__main__":
    parser = arguments(fates.__doc__ or "")
    parser.add_argument("--worlds", nargs="+", choices=tuple(fates.WORLDS), help="by default all of the modes")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    chosen = given.worlds or (fates.SHORT if given.short else fates.WORLDS)
    names = [name for name in chosen if fates.WORLDS[name].mode in given.modes]
    steps = given.steps or (4 if given.short else 6)
    print(json.dumps(fates.run_all(names, steps, given.seed, folder(given.out, "fates"))))
