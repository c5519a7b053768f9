#!/usr/bin/env bash
# Makes the environment, then lint, types and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
