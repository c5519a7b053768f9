#!/usr/bin/env bash
# Makes the environment, then runs lint, the type check and the tests of a tier, in parallel lanes. With other arguments
# it starts pytest with them at once, and neither lint (scripts/check) nor types.
#   bash scripts/test.sh [--fast | --all] [pytest arguments]
#            the default: what a change can break
#   --all    the tests marked `long`, too: each engine run, every documented command, tests/long
#   --fast   leaves out the tests that need verl, Ray or SGLang, those marked `slow`,
#            tests/faults and tests/unit/recipes: some 2 minutes
set -euo pipefail
cd "$(dirname "$0")/.."
# The tests build the docs, write traces, drive Chromium, play task sets and speak A2A.
bash scripts/environment.sh --with docs --with traces --with browser --with tasks --with a2a
# Many containers set it. Every process would then compile torch, verl and SGLang anew: half of the CPU time of its imports.
unset PYTHONDONTWRITEBYTECODE
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
export RAY_worker_niceness=0 # Ray's default, 15, lets its workers starve beside the other lanes
# The lanes share the cores, and for models so small a second thread costs more than it brings.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
tier=""
case "${1:-}" in --fast | --all) tier="$1" && shift ;; esac
if [ $# -gt 0 ]; then
    [ "$tier" != --fast ] || set -- -m "not stack and not engine and not slow and not long" "$@"
    exec .venv/bin/python -m pytest "$@"
fi
bash scripts/check
exec .venv/bin/python -m tests.support.lanes $tier # the lanes, and mypy beside them
