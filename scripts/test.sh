#!/usr/bin/env bash
# Makes the environment, then runs lint, the type check and the tests, in parallel lanes. With other arguments it starts
# pytest with them at once, and neither lint (scripts/check) nor types.
#   bash scripts/test.sh [--fast] [pytest arguments]
#   --fast   leaves out the tests that need verl, Ray or SGLang, those marked `slow`,
#            tests/faults and tests/unit/recipes: some 2 minutes
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
source scripts/install.sh
install_extras .venv docs traces browser tasks # the tests build the docs, write traces, drive Chromium, play task sets
# Many containers set it. Every process would then compile torch, verl and SGLang anew: half of the CPU time of its imports.
unset PYTHONDONTWRITEBYTECODE
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
export RAY_worker_niceness=0 # Ray's default, 15, lets its workers starve beside the other lanes
# The lanes share the cores, and for models so small a second thread costs more than it brings.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fast=""
[ "${1:-}" != --fast ] || { fast=yes && shift; }
if [ $# -gt 0 ]; then
    [ -z "$fast" ] || set -- -m "not stack and not engine and not slow" "$@"
    exec .venv/bin/python -m pytest "$@"
fi
bash scripts/check

set -m # each lane gets a process group of its own, so that it can be interrupted
logs="$(mktemp -d)"
lanes=()
trap 'for lane in "${lanes[@]}"; do kill -INT -- "-$lane" 2>/dev/null || true; done; rm -rf "$logs"' EXIT
status=0

# Starts a command in the background. `finish` prints its output.
beside() {
    "$@" >"$logs/${#lanes[@]}" 2>&1 &
    lanes+=($!)
}

finish() {
    local index
    for index in "${!lanes[@]}"; do
        wait "${lanes[$index]}" || status=$?
        cat "$logs/$index"
    done
    exit "$status"
}

tests() { .venv/bin/python -m pytest --durations=10 "$@"; }

beside .venv/bin/mypy
# There are more lanes than cores, because the tests wait much of their time.
free="not stack and not engine"
if [ -n "$fast" ]; then
    # Two lanes. The tests in tests/faults start servers and sandboxes, those of recipes compose verl's configurations.
    quick="$free and not slow"
    beside tests -m "$quick" tests/unit/rollout tests/unit/[s-z]*
    tests -m "$quick" --ignore=tests/{faults,unit/recipes,unit/rollout} --ignore-glob='tests/unit/[s-z]*' || status=$?
else
    stack="stack and not engine and not deaths"
    beside tests -m "$free" tests/unit --ignore-glob='tests/unit/[p-z]*'
    beside tests -m "$free" tests/unit/[p-z]*
    beside tests -m "$free" --ignore=tests/unit
    # Once for the lanes that import the stack, which would each compile it: 30 s of the CPU.
    .venv/bin/python -W ignore -c "import verl.trainer.main_ppo, sglang.srt.entrypoints.http_server" || true
    beside tests -m "engine" # engines in one lane, since two engines would not fit in memory
    beside tests -m "deaths and not engine"
    beside tests -m "$stack" tests/integration
    tests -m "$stack" --ignore=tests/integration || status=$?
fi
[ "$status" -ne 2 ] || exit 2 # interrupted
finish
