#!/usr/bin/env bash
# Makes the environment and trains a tiny model to call a calculator, on the CPU: see recipes/quickstart/README.md.
#   bash scripts/quickstart.sh [--seed N] [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
exec .venv/bin/python recipes/quickstart/run.py "$@"
