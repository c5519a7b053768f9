#!/usr/bin/env bash
# Makes the environment, then lint, types and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"

# The engine's tests beside all others, since its startups leave a core idle; two engines would not fit in memory.
set -m # a process group of its own, which can be interrupted
log="$(mktemp)"
.venv/bin/python -m pytest -m engine --durations=10 >"$log" 2>&1 &
engine=$!
trap 'kill -INT -- "-$engine" 2>/dev/null || true; rm -f "$log"' EXIT
status=0
.venv/bin/python -m pytest -m "not engine" --durations=10 || status=$?
[ "$status" -ne 2 ] || exit 2 # interrupted
wait "$engine" || status=$?
cat "$log"
exit "$status"
