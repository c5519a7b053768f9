#!/usr/bin/env bash
# Customers of an airline or a shop, whom a model plays, see README.md; the settings are in config.yaml.
#   bash recipes/tau2/run.sh [--smoke] [--variant retail] [--seed N] [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
extras=tasks
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
